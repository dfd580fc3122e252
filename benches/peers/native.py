"""llama.cpp behind one line of JSON per job: reads {"ids": [...], "count": n} from stdin, answers with its own timings.

    python native.py FILE.gguf THREADS CONTEXT
"""

import json
import sys

import xllamacpp

path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx = context
params.n_parallel = 1
params.n_gpu_layers = 0
params.cpuparams.n_threads = threads
params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
print(json.dumps({"system": xllamacpp.get_system_info().strip()}), flush=True)

for line in sys.stdin:
    job = json.loads(line)
    answer = server.handle_completions(
        {
            "prompt": job["ids"],
            "n_predict": job["count"],
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,  # else the second run finds the prompt in the cache
            "stream": False,
        }
    )
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    print(json.dumps({"timings": answer["timings"], "text": answer["choices"][0]["text"]}), flush=True)
