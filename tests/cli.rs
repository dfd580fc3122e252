//! The command line as a program: what it prints where, what it exits with, and that whatever is wrong is said in one
//! readable sentence that names the thing.

mod checkpoints;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use checkpoints::{Golden, golden_folder, ids};
use serde_json::Value;

/// What the program said.
#[derive(Debug)]
struct Outcome {
    code: i32,
    stdout: String,
    stderr: String,
}

/// Runs the program with the arguments of `line`, split at blanks, and `more`.
fn forecall(line: &str, more: &[&str]) -> Outcome {
    outcome(Command::new(env!("CARGO_BIN_EXE_forecall")).args(line.split_whitespace()).args(more))
}

/// The same on a machine that has no GPU driver, as far as the program can see.
fn without_gpu(line: &str) -> Outcome {
    let none = "/no/such/driver.json";
    let mut command = Command::new(env!("CARGO_BIN_EXE_forecall"));
    outcome(command.args(line.split_whitespace()).env("VK_DRIVER_FILES", none).env("VK_ICD_FILENAMES", none))
}

fn outcome(command: &mut Command) -> Outcome {
    let output = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Outcome { code: output.status.code().expect("no signal"), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// `--model DIR --backend cpu` for a golden checkpoint.
fn model(name: &str) -> String {
    on_cpu(&golden_folder(name))
}

fn on_cpu(folder: &Path) -> String {
    format!("--model {} --backend cpu", folder.display())
}

const TIED: &str = "tiny-llama-tied";

impl Outcome {
    /// Success: stdout is one JSON object on one line.
    fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{self:?}");
        assert_eq!(self.stdout.trim_end().lines().count(), 1, "{self:?}");
        let value: Value = serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        assert!(value.is_object());
        value
    }

    /// Failure of the work: nothing on stdout, and one line on stderr that has every word of `names`.
    fn refused(&self, names: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (1, ""), "{self:?}");
        let line = self.stderr.strip_prefix("forecall: ").unwrap_or_else(|| panic!("{self:?}"));
        assert_eq!(line.trim_end().lines().count(), 1, "one sentence: {self:?}");
        assert!(line.len() > 20 && !line.contains("panicked") && !line.contains("internal error"), "{self:?}");
        for name in names {
            assert!(line.contains(name), "\"{name}\" is not named: {self:?}");
        }
    }

    /// Failure to read the arguments.
    fn usage(&self, name: &str) {
        assert_eq!((self.code, self.stdout.as_str()), (2, ""), "{self:?}");
        assert!(self.stderr.starts_with("forecall: ") && self.stderr.contains(name), "{self:?}");
        assert_eq!(self.stderr.trim_end().lines().count(), 1, "one sentence: {self:?}");
    }
}

/// A copy of a golden checkpoint that a test may spoil; gone with the value.
struct Copied(PathBuf);

impl Copied {
    fn new(name: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let folder = format!("cli-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
        let from = golden_folder(name);
        // A family keeps its adapter in one of two folders, or has none.
        for part in ["", "draft_adapter", "linear_spec_lora"] {
            let Ok(files) = std::fs::read_dir(from.join(part)) else { continue };
            std::fs::create_dir_all(folder.join(part)).unwrap();
            for file in files.map(Result::unwrap).filter(|file| file.file_type().unwrap().is_file()) {
                let name = file.file_name();
                if !name.to_string_lossy().starts_with("golden.") {
                    std::fs::copy(file.path(), folder.join(part).join(name)).unwrap();
                }
            }
        }
        Self(folder)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.join(file)
    }

    /// Sets a field of a JSON file.
    fn set(&self, file: &str, field: &str, value: Value) -> &Self {
        let mut json = checkpoints::json(&self.path(file));
        json[field] = value;
        std::fs::write(self.path(file), json.to_string()).unwrap();
        self
    }

    /// Changes a tensor's entry in a safetensors header.
    fn edit(&self, file: &str, tensor: &str, change: impl FnOnce(&mut Value)) -> &Self {
        let bytes = std::fs::read(self.path(file)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let entry = header.get_mut(tensor).unwrap_or_else(|| panic!("no {tensor}"));
        change(entry);
        let header = header.to_string();
        let parts = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]];
        std::fs::write(self.path(file), parts.concat()).unwrap();
        self
    }

    fn generate(&self) -> Outcome {
        forecall(&format!("generate {} --tokens 1,2 --max-tokens 2", on_cpu(&self.0)), &[])
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_untouched_copy_runs() {
    for name in checkpoints::GOLDEN {
        let done = Copied::new(name).generate();
        assert_eq!(done.code, 0, "{done:?}");
    }
}

#[test]
fn stdout_is_the_text_and_nothing_else() {
    let done = forecall(&format!("generate {} --max-tokens 20", model(TIED)), &["--prompt", "every morning"]);
    assert_eq!((done.code, done.stdout.as_str()), (0, " the baker gets up b\n"), "{done:?}");
    assert!(done.stderr.contains("20 tokens"), "a summary goes to stderr: {done:?}");
    // Without a tokenizer there is no text, so the ids are printed.
    let truth = Golden::read("tiny-llama");
    let (prompt, tokens) = (ids(&truth.json["prompt"]), ids(&truth.json["greedy"][0]["tokens"]));
    let join = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let done = forecall(&format!("generate {} --max-tokens 6 --tokens {}", model("tiny-llama"), join(&prompt)), &[]);
    assert_eq!((done.code, done.stdout), (0, join(&tokens[..6]) + "\n"));
}

#[test]
fn a_reader_that_goes_away_ends_the_work() {
    use std::io::Read;
    let line = format!("generate {} --prompt e --ignore-eos --schedule autoregressive", model("tiny-nemotron-trained"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_forecall"))
        .args(line.split_whitespace())
        .args(["--max-tokens", "1000000"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(child.wait().unwrap().success(), "{stderr}");
    assert!(!stderr.contains("tokens"), "no summary of a whole text: {stderr}");
}

#[test]
fn json_has_every_field_and_exactly_n_tokens() {
    for schedule in ["autoregressive", "two-call", "two-call-seed", "packed", "anchored", "quadratic", "quadratic-shared"] {
        for count in [1, 2, 7, 33] {
            let line = format!("generate {} --json --schedule {schedule} --max-tokens {count}", model(TIED));
            let done = forecall(&line, &["--prompt", "every morning"]).json();
            let tokens = ids(&done["tokens"]);
            assert_eq!(tokens.len(), count, "{done}");
            assert_eq!(done["text"].as_str().unwrap().len(), count, "a byte tokenizer: {done}");
            assert_eq!((&done["finish_reason"], &done["schedule"]), (&"length".into(), &schedule.into()));
            let per_call = done["per_call"].as_array().unwrap();
            assert_eq!(done["calls"], per_call.len());
            let sum = |field: &str| per_call.iter().map(|c| c[field].as_u64().unwrap()).sum::<u64>();
            assert_eq!(done["rows"], sum("rows"));
            assert!(sum("accepted") <= sum("drafted"));
            assert_eq!(done["prefill"]["calls"], 1);
            assert!(done["prefill"]["rows"].as_u64().unwrap() >= 13);
            for phase in ["tokenize", "first_token", "prefill", "decode", "total"] {
                assert!(done["timings_ms"][phase].as_f64().unwrap() >= 0.0, "{done}");
            }
            if schedule == "autoregressive" {
                assert_eq!((&done["calls"], &done["rows"]), (&(count - 1).into(), &(count - 1).into()));
                assert_eq!(done["prefill"]["rows"], 13);
            } else if count == 33 {
                assert!(sum("accepted") > 0, "{done}");
            }
        }
    }
}

/// The trained checkpoint's third text has an end id at place 9, reached by a run of accepted tokens.
#[test]
fn an_end_id_inside_an_accepted_run_cuts_there() {
    let truth = Golden::read(TIED);
    let text = &truth.json["greedy"][2];
    let (prompt, tokens) = (ids(&text["prompt"]), ids(&text["tokens"]));
    let end = text["first_end"].as_u64().unwrap() as usize;
    let prompt = prompt.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    for schedule in ["autoregressive", "two-call", "two-call-seed", "packed", "anchored", "quadratic", "quadratic-shared"] {
        let line = format!("generate {} --json --schedule {schedule} --tokens {prompt}", model(TIED));
        let done = forecall(&format!("{line} --max-tokens 48"), &[]).json();
        assert_eq!(ids(&done["tokens"]), tokens[..=end], "{schedule}: the end id is the last token");
        assert_eq!((&done["finish_reason"], &done["text"]), (&"stop".into(), &" vu 🍞\n".into()), "{schedule}");
        let done = forecall(&format!("{line} --max-tokens 48 --ignore-eos"), &[]).json();
        assert_eq!(ids(&done["tokens"]), tokens, "{schedule}: an ordinary token");
        assert_eq!(done["finish_reason"], "length");
    }
    // With another end id, in the middle of what one call accepted, the text is cut there: the first call accepts four.
    let copy = Copied::new(TIED);
    copy.set("config.json", "eos_token_id", tokens[2].into());
    let line = format!("generate {} --json --schedule packed --tokens {prompt} --max-tokens 48", on_cpu(&copy.0));
    let done = forecall(&line, &[]).json();
    assert_eq!(ids(&done["tokens"]), tokens[..=2], "{done}");
    assert_eq!(done["finish_reason"], "stop");
    let last = done["per_call"].as_array().unwrap().last().unwrap();
    assert!(last["accepted"].as_u64().unwrap() >= 2, "the cut is inside an accepted run: {done}");
}

#[test]
fn all_backends_print_the_same_ids() {
    let texts: Vec<Value> = ["cpu", "reference", "gpu"]
        .iter()
        .map(|backend| {
            let folder = golden_folder(TIED);
            let line =
                format!("generate --model {} --backend {backend} --json --max-tokens 24 --schedule packed", folder.display());
            forecall(&line, &["--prompt", "every morning"]).json()["tokens"].clone()
        })
        .collect();
    assert_eq!(texts[0], texts[1]);
    assert_eq!(texts[0], texts[2]);
}

#[test]
fn adapter_none_leaves_the_drafter_out() {
    let line = format!("generate {} --adapter none --json --max-tokens 8", model(TIED));
    let done = forecall(&line, &["--prompt", "every morning"]).json();
    assert_eq!((&done["schedule"], &done["calls"]), (&"autoregressive".into(), &7.into()));
    for schedule in ["two-call", "packed", "quadratic"] {
        forecall(&format!("{line} --schedule {schedule}"), &["--prompt", "every morning"]).refused(&[
            schedule,
            "drafter",
            "autoregressive",
        ]);
    }
    let adapter = golden_folder(TIED).join("draft_adapter");
    let line = format!("generate {} --adapter {} --json --max-tokens 8 --schedule packed", model(TIED), adapter.display());
    assert_eq!(forecall(&line, &["--prompt", "every morning"]).json()["tokens"], done["tokens"]);
    forecall(&format!("generate {} --adapter /no/such/place --tokens 1", model(TIED)), &[]).refused(&["/no/such/place"]);
    let other = golden_folder("tiny-llama").join("draft_adapter");
    forecall(&format!("generate {} --adapter {} --tokens 1", model(TIED), other.display()), &[])
        .refused(&["lora_A", "[4, 72]", "[4, 96]"]);
}

#[test]
fn logits_prints_the_raw_rows() {
    let truth = Golden::read("tiny-llama");
    let prompt = ids(&truth.json["prompt"]).iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let line = format!("logits {} --tokens {prompt}", model("tiny-llama"));
    let rows = |value: &Value| -> Vec<f32> {
        let rows = value.as_array().unwrap().iter();
        rows.flat_map(|row| row.as_array().unwrap()).map(|v| v.as_f64().unwrap() as f32).collect()
    };
    let plain = forecall(&line, &[]).json();
    assert!(plain.get("draft").is_none());
    let drafted = forecall(&format!("{line} --draft-width 7"), &[]).json();
    for (name, value) in
        [("causal.logits", &plain["causal"]), ("causal.logits", &drafted["causal"]), ("draft.w7.logits", &drafted["draft"])]
    {
        let error = checkpoints::distance(&rows(value), &truth.tensor(name).values, truth.logit_range());
        assert!(error < 1e-4, "{name}: {error}");
    }
    let fits = ["draft width", "159"];
    forecall(&format!("{line} --draft-width 0"), &[]).refused(&fits);
    forecall(&format!("{line} --draft-width 4000000000"), &[]).refused(&fits);
    forecall(&format!("{line} --draft-width 3 --adapter none"), &[]).refused(&["drafter"]);
    forecall(&format!("logits {} --tokens 1,211", model("tiny-llama")), &[]).refused(&["211"]);
    forecall(&format!("{line} --context 5"), &[]).refused(&["13 tokens", "5"]);
}

#[test]
fn info_says_what_the_model_is() {
    let info = forecall(&format!("info {} --json", model("tiny-llama-q4")), &[]).json();
    let same = |field: &str, value: Value| assert_eq!(info[field], value, "{field}");
    same("model_type", "llama".into());
    same("num_hidden_layers", 3.into());
    same("vocab_size", 211.into());
    same("context_length", 512.into());
    same("tokenizer", false.into());
    same("row_invariant", true.into());
    same("backend", "cpu".into());
    same("end_ids", vec![2].into());
    assert_eq!(info["matrix_formats"]["4-bit, groups of 32"], 12);
    assert_eq!(info["drafter"]["logit_shift"], 1);
    assert!(info["memory_bytes"]["weights"].as_u64().unwrap() > 100_000);
    assert!(info["memory_bytes"]["kv_cache"].as_u64().unwrap() > 100_000);
    let bare = forecall(&format!("info {} --adapter none --json", model("tiny-llama-q4")), &[]).json();
    assert_eq!(bare["drafter"], Value::Null);
    let text = forecall(&format!("info {}", model("tiny-llama-q4")), &[]);
    assert!(text.code == 0 && text.stdout.contains("hidden_size: 64\n"), "{text:?}");

    let gpu = forecall(&format!("info --model {} --backend gpu --json", golden_folder("tiny-llama-q4").display()), &[]).json();
    assert_eq!((&gpu["backend"], &gpu["row_invariant"]), (&"webgpu".into(), &true.into()));
    let device = &gpu["device"];
    assert!(!device["name"].as_str().unwrap().is_empty(), "{gpu}");
    assert!(device["max_storage_buffer_binding_size"].as_u64().unwrap() >= 1 << 27, "{gpu}");
    assert!(device["shader_f16"].is_boolean() && device["subgroups"].is_boolean(), "{gpu}");
}

/// `auto`, the default, takes a real GPU and nothing else, and says why.
#[test]
fn by_default_a_real_gpu_runs_the_model_or_the_cpu() {
    let folder = golden_folder(TIED);
    let line = |command: &str, rest: &str| format!("{command} --model {} {rest}", folder.display());
    let asked = forecall(&line("info --json", "--backend gpu"), &[]).json();
    assert_eq!((&asked["backend"], &asked["backend_reason"]), (&"webgpu".into(), &"asked for".into()));
    let software = asked["device"]["type"] == "software";
    let (backend, why) = if software { ("cpu", "is a software one") } else { ("webgpu", "there is a GPU") };
    let preflight = |backend: &str| line("info --preflight --json", backend);
    for (info, what) in [
        (forecall(&line("info --json", ""), &[]).json(), "the default"),
        (forecall(&line("info --json", "--backend auto"), &[]).json(), "auto"),
        (forecall(&preflight(""), &[]).json(), "preflight"),
    ] {
        let reason = info["backend_reason"].as_str().unwrap();
        assert_eq!(info["backend"], backend, "{what}: {info}");
        assert!(reason.contains(why), "{what}: {info}");
        assert!(!software || reason.contains(asked["device"]["name"].as_str().unwrap()), "the adapter is named: {info}");
    }
    let told = forecall(&line("generate", "--max-tokens 2 --prompt e"), &[]);
    assert_eq!((told.code, told.stderr.contains("on the CPU: ")), (0, software), "{told:?}");
    let told = forecall(&line("generate", "--max-tokens 2 --prompt e --backend cpu"), &[]);
    assert!(told.code == 0 && !told.stderr.contains("on the CPU: "), "asked for, so nothing is to be explained: {told:?}");

    // Without any adapter.
    let none = without_gpu(&line("info --json", "")).json();
    assert_eq!(none["backend"], "cpu");
    assert!(none["backend_reason"].as_str().unwrap().contains("no WebGPU adapter"), "{none}");
    without_gpu(&line("info --json", "--backend gpu")).refused(&["no WebGPU adapter"]);
    let asked = without_gpu(&preflight("--backend gpu")).json();
    assert_eq!((&asked["fits"], &asked["backend"]), (&false.into(), &"webgpu".into()), "{asked}");
    assert!(asked["reason"].as_str().unwrap().contains("no WebGPU adapter"), "{asked}");
    let auto = without_gpu(&preflight("")).json();
    assert_eq!((&auto["fits"], &auto["backend"]), (&true.into(), &"cpu".into()), "{auto}");
    assert_eq!(forecall(&preflight("--backend gpu"), &[]).json()["fits"], true, "control: here there is one");
}

/// Of the config, the generation config and the tokenizer; no other special token.
#[test]
fn end_ids_come_from_three_places() {
    let copy = Copied::new(TIED);
    let tokenizer = checkpoints::json(&copy.path("tokenizer.json"));
    let id = |token: &str| tokenizer["model"]["vocab"][token].as_u64().unwrap();
    let mut added = tokenizer["added_tokens"].clone();
    for (i, text) in ["<think>", "</think>"].into_iter().enumerate() {
        let mut token = added[0].clone();
        (token["content"], token["id"]) = (text.into(), (257 + i).into());
        added.as_array_mut().unwrap().push(token);
    }
    copy.set("tokenizer.json", "added_tokens", added);
    let line = on_cpu(&copy.0);
    let ends = || forecall(&format!("info {line} --json"), &[]).json()["end_ids"].clone();
    let text = || forecall(&format!("generate {line} --max-tokens 20 --json"), &["--prompt", "every morning"]).json();
    assert_eq!(ends(), serde_json::json!([256]));
    assert_eq!((text()["text"].clone(), text()["finish_reason"].clone()), (" the baker gets up b".into(), "length".into()));
    // The tokenizer's own, which the config does not know.
    copy.set("tokenizer_config.json", "eos_token", "g".into());
    assert_eq!(ends(), serde_json::json!([id("g"), 256]));
    assert_eq!((text()["text"].clone(), text()["finish_reason"].clone()), (" the baker ".into(), "stop".into()));
    // The generation config's.
    std::fs::write(copy.path("generation_config.json"), format!("{{\"eos_token_id\": [{}]}}", id("k"))).unwrap();
    let mut all = [id("g"), id("k"), 256];
    all.sort_unstable();
    assert_eq!(ends(), serde_json::json!(all));
    assert_eq!(text()["text"], " the ba");
}

#[test]
fn preflight_reads_no_weights() {
    let copy = Copied::new("tiny-llama-q4");
    let line = format!("info --preflight {} --json", on_cpu(&copy.0));
    let whole = forecall(&line, &[]).json();
    assert_eq!((&whole["fits"], &whole["backend"], &whole["model_type"]), (&true.into(), &"cpu".into(), &"llama".into()));
    assert_eq!(whole["quantization"], "4-bit, groups of 32");
    assert_eq!(whole["download"]["bytes"], 0, "a folder is here already");
    assert!(whole["memory"]["weights"].as_u64().unwrap() > 100_000, "{whole}");
    // With weights that cannot be quantised to anything it says the same, and loading does not.
    let file = copy.path("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + length..].fill(0xFF);
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(forecall(&line, &[]).json(), whole);
    assert_ne!(copy.generate().code, 0, "control");
    let gpu = forecall(&format!("info --preflight --json --backend gpu --model {}", copy.0.display()), &[]).json();
    assert!(gpu["memory"]["largest_binding"]["bytes"].as_u64().unwrap() > 1000, "{gpu}");
}

#[test]
fn quantising_what_is_quantised_is_told_of() {
    let line = |name: &str| format!("generate {} --quantize q8 --tokens 1,2 --max-tokens 2", model(name));
    let done = forecall(&line("tiny-llama-q4"), &[]);
    assert!(done.code == 0 && done.stderr.contains("warning: the checkpoint is quantised already"), "{done:?}");
    let done = forecall(&line("tiny-llama"), &[]);
    assert!(done.code == 0 && !done.stderr.contains("warning"), "{done:?}");
}

#[test]
fn special_tokens_in_a_message_are_text() {
    let copy = Copied::new(TIED);
    std::fs::write(copy.path("chat_template.jinja"), "{{ messages[0].content }}<|end|>").unwrap();
    let line = format!("generate {} --json --max-tokens 1", on_cpu(&copy.0));
    let message = forecall(&format!("{line} --chat"), &["--prompt", "a<|end|>b"]).json();
    assert_eq!(message["prompt_tokens"], 1 + 7 + 1 + 1, "bytes, and the template's token: {message}");
    let text = forecall(&line, &["--prompt", "a<|end|>b<|end|>"]).json();
    assert_eq!(text["prompt_tokens"], 4, "control: a text is taken as it is");
}

#[test]
fn a_gpu_is_opened_without_a_word() {
    let line = format!("generate --model {} --backend gpu --tokens 1 --max-tokens 1", golden_folder("tiny-llama").display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_forecall"));
    let output = command.args(line.split_whitespace()).env_remove("XDG_RUNTIME_DIR").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(stderr.trim_end().lines().count(), 1, "the summary: {stderr}");
    assert!(stderr.starts_with("1 tokens"), "{stderr}");
}

#[test]
fn weights_that_are_not_numbers_give_no_answer() {
    let copy = Copied::new("tiny-llama");
    let file = copy.path("model.safetensors");
    let weights = std::fs::read(&file).unwrap();
    let length = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&weights[8..8 + length]).unwrap();
    // One value of a layer, or one of the head's first row.
    let (layer, head) = ("model.layers.1.mlp.down_proj.weight", "lm_head.weight");
    for (value, tensor) in [(f32::NAN, layer), (f32::INFINITY, layer), (f32::NAN, head)] {
        let at = 8 + length + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
        let mut spoiled = weights.clone();
        spoiled[at..at + 4].copy_from_slice(&value.to_le_bytes());
        std::fs::write(&file, spoiled).unwrap();
        for backend in ["cpu", "gpu", "reference"] {
            let on = format!("--model {} --backend {backend}", copy.0.display());
            for line in [
                format!("generate {on} --tokens 1,2 --max-tokens 2"),
                format!("generate {on} --tokens 1,2 --max-tokens 2 --schedule autoregressive --json"),
                format!("logits {on} --tokens 1,2"),
                format!("info {on} --json"),
            ] {
                forecall(&line, &[]).refused(&["not finite", "weights"]);
            }
        }
    }
    // A logit of -infinity is never chosen, and a text may do without it; raw logits are refused all the same.
    let at = 8 + length + header[head]["data_offsets"][0].as_u64().unwrap() as usize;
    let mut spoiled = weights.clone();
    spoiled[at..at + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    std::fs::write(&file, spoiled).unwrap();
    let line = format!("logits --model {} --backend reference --tokens 1,2", copy.0.display());
    forecall(&line, &[]).refused(&["not finite", "behind token 0, id 0 has"]);
    std::fs::write(&file, &weights).unwrap();
    assert_eq!(forecall(&line, &[]).code, 0, "control");
}

#[test]
fn wrong_arguments() {
    let nothing = forecall("", &[]);
    assert!(nothing.code == 2 && nothing.stdout.is_empty() && nothing.stderr.contains("Usage"), "{nothing:?}");
    forecall("generate", &[]).usage("--model");
    forecall(&format!("generate {}", model(TIED)), &[]).usage("--prompt");
    forecall(&format!("generate {} --tokens one", model(TIED)), &[]).usage("one");
    forecall(&format!("generate {} --tokens 1,-2", model(TIED)), &[]).usage("-2");
    forecall(&format!("generate {} --tokens 1 --prompt hi", model(TIED)), &[]).usage("--prompt");
    forecall("generate --model x --tokens 1 --backend tpu", &[]).usage("tpu");
    forecall(&format!("generate {} --tokens 1 --chat", model(TIED)), &[]).usage("--chat");
    forecall("sing", &[]).usage("sing");
    let help = forecall("generate --help", &[]);
    assert!(help.code == 0 && help.stdout.contains("--draft-width") && help.stderr.is_empty(), "{help:?}");
}

#[test]
fn requests_that_do_not_fit() {
    let line = |rest: &str| format!("generate {} --tokens 1,2,3,4 {rest}", model(TIED));
    let refused = |rest: &str, names: &[&str]| forecall(&line(rest), &[]).refused(names);
    refused("--max-tokens 0", &["max tokens is 0"]);
    refused("--context 3", &["4 tokens", "3 positions"]);
    refused("--context 0", &["context length is 0", "512"]);
    refused("--context 513", &["513", "512"]);
    refused("--schedule packed --verify-width 0", &["verify width is 0"]);
    refused("--schedule packed --draft-width 0", &["draft width is 0"]);
    refused("--schedule two-call --draft-width 0", &["draft width is 0"]);
    for huge in ["1000", "4294967295", "4294967296", "18446744073709551615"] {
        refused(&format!("--schedule packed --verify-width {huge}"), &["width"]);
        refused(&format!("--schedule packed --draft-width {huge}"), &["width"]);
        refused(&format!("--schedule two-call --draft-width {huge}"), &["width"]);
        refused(&format!("--schedule quadratic --verify-width {huge}"), &["width"]);
    }
    refused("--schedule quadratic --verify-width 40 --draft-width 40", &["width"]);
    refused("--schedule fast", &["\"fast\"", "packed", "autoregressive"]);
    refused("--schedule packed --anchors 2", &["anchors", "anchored"]);
    refused("--schedule anchored --anchors 0", &["anchor"]);
    refused("--schedule block-diffusion", &["made for it"]);
    refused("--schedule packed --threshold 0.5", &["threshold", "block-diffusion"]);
    let tokens = |tokens: &str| format!("generate {} --tokens {tokens}", model(TIED));
    forecall(&tokens("1,257"), &[]).refused(&["257", "vocabulary"]);
    forecall(&tokens("4294967295"), &[]).refused(&["4294967295", "257"]);
    forecall(&format!("generate {}", model(TIED)), &["--prompt", ""]).refused(&["no tokens"]);
    forecall(&format!("generate {} --stop x --tokens 1", model("tiny-llama")), &[]).refused(&["tokenizer.json"]);
    forecall(&format!("generate {}", model("tiny-llama")), &["--prompt", "hi"]).refused(&["tokenizer.json"]);
    forecall(&format!("generate {} --chat", model(TIED)), &["--prompt", "hi"]).refused(&["chat template"]);
    // A full context ends the text where it is full.
    let full = forecall(&line("--context 9 --json --schedule packed --ignore-eos --max-tokens 64"), &[]).json();
    assert_eq!((&full["finish_reason"], full["tokens"].as_array().unwrap().len()), (&"context".into(), 6));
}

#[test]
fn folders_and_files_that_are_missing_or_broken() {
    forecall("generate --model /no/such/folder --backend cpu --tokens 1", &[]).refused(&["/no/such/folder"]);
    // What is wrong with any model is said before one is looked for.
    forecall("generate --model /no/such/folder --tokens 1 --schedule pakced", &[]).refused(&["pakced", "autoregressive"]);
    forecall("generate --model /no/such/folder --tokens 1 --max-tokens 0", &[]).refused(&["max tokens is 0"]);
    forecall("generate --model /no/such/folder --tokens 1", &["--stop", "a", "--stop", ""]).refused(&["--stop is empty"]);
    forecall("generate --model /no/such/folder --chat --prompt a --template-variables 1", &[]).refused(&["--template-variables"]);
    forecall(&format!("generate {} --tokens 1", model(TIED)), &["--store", ""]).refused(&["--store"]);
    // What only says something about the network is not ignored with a folder.
    let folder = format!("generate {} --tokens 1 --max-tokens 1", model(TIED));
    forecall(&folder, &["--header", "Authorization: Bearer x"]).refused(&["--header", "folder"]);
    forecall(&folder, &["--revision", "main"]).refused(&["revision main", "folder"]);
    forecall(&folder, &["--hub-url", "http://127.0.0.1:9"]).refused(&["--hub-url", "only repositories"]);
    forecall("info --model http://127.0.0.1:9/x --hub-url http://127.0.0.1:9", &[]).refused(&["--hub-url", "only repositories"]);
    let hub = ["--hub-url", "http://127.0.0.1:9", "--adapter", "owner/adapter", "--store", "none"];
    forecall(&folder, &hub).refused(&["http://127.0.0.1:9/"]);
    for file in ["config.json", "model.safetensors"] {
        let copy = Copied::new(TIED);
        std::fs::remove_file(copy.path(file)).unwrap();
        copy.generate().refused(&[file, &copy.path("").display().to_string().trim_end_matches('/')]);
        std::fs::write(copy.path(file), "").unwrap();
        copy.generate().refused(&[file]);
        std::fs::write(copy.path(file), "{\"a\": ").unwrap();
        copy.generate().refused(&[file]);
    }
    for (file, keep) in
        [("model.safetensors", 0.6), ("model.safetensors", 0.001), ("draft_adapter/adapter_model.safetensors", 0.5)]
    {
        let copy = Copied::new(TIED);
        let bytes = std::fs::read(copy.path(file)).unwrap();
        std::fs::write(copy.path(file), &bytes[..(bytes.len() as f64 * keep) as usize]).unwrap();
        copy.generate().refused(&[file.rsplit('/').next().unwrap()]);
    }
    let copy = Copied::new(TIED);
    std::fs::write(copy.path("tokenizer.json"), "{\"version\": \"1.0\"}").unwrap();
    copy.generate().refused(&["tokenizer.json"]);
    std::fs::write(copy.path("tokenizer.json"), "not JSON").unwrap();
    copy.generate().refused(&["tokenizer.json"]);
    let copy = Copied::new(TIED);
    std::fs::write(copy.path("tokenizer_config.json"), "[]").unwrap();
    copy.generate().refused(&["tokenizer_config.json"]);
    // A token that would end texts, were it ever chosen.
    Copied::new("tiny-setdlm-trained")
        .set("tokenizer_config.json", "eos_token", "<|fim_middle|>".into())
        .generate()
        .refused(&["mask token 257", "end id"]);
}

#[test]
fn a_chat_template_that_cannot_be_used_is_in_nobodys_way() {
    let copy = Copied::new(TIED);
    let info = || forecall(&format!("info {} --json", on_cpu(&copy.0)), &[]).json();
    let none = info();
    assert_eq!((&none["chat_template"], &none["chat_template_error"]), (&false.into(), &Value::Null));
    std::fs::write(copy.path("chat_template.jinja"), "hi").unwrap();
    let good = info();
    assert_eq!((&good["chat_template"], &good["chat_template_error"]), (&true.into(), &Value::Null));
    for template in ["{% for %}".as_bytes(), b"{{ f(*messages) }}", b"\xff"] {
        std::fs::write(copy.path("chat_template.jinja"), template).unwrap();
        assert_eq!(copy.generate().code, 0);
        let text = forecall(&format!("generate {} --max-tokens 2", on_cpu(&copy.0)), &["--prompt", "hi"]);
        assert_eq!(text.code, 0, "{text:?}");
        forecall(&format!("generate {} --chat", on_cpu(&copy.0)), &["--prompt", "hi"]).refused(&["chat template"]);
        let info = info();
        assert_eq!(info["chat_template"], Value::Bool(false));
        assert!(info["chat_template_error"].as_str().is_some_and(|error| error.contains("template")), "{info}");
    }
}

#[test]
fn template_variables_reach_the_template() {
    let copy = Copied::new(TIED);
    std::fs::write(copy.path("chat_template.jinja"), "{{ raise_exception('thinking: ' ~ enable_thinking ~ tools[0].name) }}")
        .unwrap();
    let chat = format!("generate {} --chat", on_cpu(&copy.path("")));
    let given = |json: &str| forecall(&chat, &["--prompt", "hi", "--template-variables", json]);
    given(r#"{"enable_thinking": "deeply", "tools": [{"name": " with a spade"}]}"#).refused(&["thinking: deeply with a spade"]);
    given("[1]").refused(&["--template-variables", "JSON object"]);
    given(r#"{"messages": []}"#).refused(&["`messages`", "leave it out"]);
    given(r#"{"add_generation_prompt": false}"#).refused(&["`add_generation_prompt`"]);
    given(r#"{"enable-thinking": false}"#).refused(&["`enable-thinking`", "identifier"]);
    // Said before a model is looked for.
    let nowhere = "generate --model /no/such/folder --chat --prompt hi --template-variables";
    forecall(nowhere, &[r#"{"messages": []}"#]).refused(&["`messages`"]);
    forecall(&format!("generate {} --tokens 1", model(TIED)), &["--template-variables", "{}"]).usage("--template-variables");
}

#[test]
fn tensors_of_the_wrong_shape_or_type() {
    let (file, name) = ("model.safetensors", "model.layers.1.mlp.down_proj.weight");
    // Another shape of the same size, so that the file itself is in order.
    let copy = Copied::new(TIED);
    copy.edit(file, name, |entry| entry["shape"] = serde_json::json!([96, 64])).generate().refused(&[name, "64", "96"]);
    let copy = Copied::new(TIED);
    copy.edit(file, name, |entry| entry["dtype"] = "I32".into()).generate().refused(&[name, "I32"]);
    let copy = Copied::new(TIED);
    copy.edit(file, name, |entry| entry["dtype"] = "F99".into()).generate().refused(&["F99"]);
    // What a file says is shown in bearable length, and no terminal obeys it.
    let copy = Copied::new(TIED);
    let done = copy.edit(file, name, |entry| entry["dtype"] = format!("\u{1b}[31m{}", "x".repeat(100_000)).into()).generate();
    done.refused(&["[31mxxx"]);
    assert!(done.stderr.len() < 2000 && !done.stderr.contains('\u{1b}'), "{} bytes", done.stderr.len());
    let copy = Copied::new(TIED);
    copy.edit(file, name, |entry| entry["data_offsets"] = serde_json::json!([0, 1u64 << 40])).generate().refused(&[file]);
    // Quantised: scales of another shape.
    let (copy, scales) = (Copied::new("tiny-llama-q4"), "model.layers.0.mlp.up_proj.scales");
    copy.edit(file, scales, |entry| entry["shape"] = serde_json::json!([2, 96])).generate().refused(&[
        "mlp.up_proj.weight",
        "scales",
        "[2, 96]",
    ]);
    // The adapter's.
    let (file, name) =
        ("draft_adapter/adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
    let copy = Copied::new(TIED);
    copy.edit(file, name, |entry| entry["shape"] = serde_json::json!([64, 8])).generate().refused(&["lora_A"]);
    let copy = Copied::new(TIED);
    copy.edit(file, "mask_embedding", |entry| entry["shape"] = serde_json::json!([1, 64]));
    let done = copy.generate();
    assert!(done.code == 0 || done.stderr.contains("mask_embedding"), "{done:?}");
    let copy = Copied::new(TIED);
    copy.edit(file, "mask_embedding", |entry| entry["shape"] = serde_json::json!([32, 2]))
        .generate()
        .refused(&["mask_embedding"]);
}

#[test]
fn configs_that_say_something_impossible() {
    let refused = |field: &str, value: Value, names: &[&str]| {
        Copied::new(TIED).set("config.json", field, value).generate().refused(names);
    };
    refused("model_type", "rwkv7".into(), &["rwkv7"]);
    refused("model_type", Value::Null, &["model_type"]);
    refused("hidden_size", 0.into(), &["hidden_size"]);
    refused("hidden_size", "64".into(), &["hidden_size"]);
    refused("hidden_size", 63.into(), &["63"]);
    refused("hidden_size", 1_000_000_000_000_000u64.into(), &["1000000000000000"]);
    refused("num_hidden_layers", 4.into(), &["layers.3"]);
    refused("num_hidden_layers", 4_000_000_000u64.into(), &["num_hidden_layers"]);
    refused("num_key_value_heads", 3.into(), &["num_key_value_heads"]);
    refused("head_dim", 15.into(), &["head_dim"]);
    refused("vocab_size", 300.into(), &["300", "257"]);
    refused("hidden_act", "relu".into(), &["hidden_act", "relu"]);
    refused("rms_norm_eps", "x".into(), &["rms_norm_eps"]);
    refused("eos_token_id", (-1).into(), &["eos_token_id"]);
    refused("quantization", serde_json::json!({ "group_size": 48, "bits": 4 }), &["group_size", "48"]);
    refused("quantization", serde_json::json!({ "group_size": 32, "bits": 3 }), &["bits", "3"]);
    let adapter = |field: &str, value: Value, names: &[&str]| {
        Copied::new(TIED).set("draft_adapter/adapter_config.json", field, value).generate().refused(names);
    };
    adapter("r", 0.into(), &["`r`"]);
    adapter("peft_type", "IA3".into(), &["IA3"]);
    adapter("draft", serde_json::json!({ "mask_embedding": "mask_embedding", "logit_shift": 2 }), &["logit_shift", "2"]);
    adapter("lora_alpha", "x".into(), &["lora_alpha"]);
}
