//! The command line: `generate`, `logits`, `info`, `bench`.
//!
//! stdout carries the text, or with `--json` one object; everything else goes to stderr. A failure is one sentence and a
//! non-zero exit.

#[cfg(target_arch = "wasm32")]
fn main() {}

#[cfg(not(target_arch = "wasm32"))]
fn main() -> std::process::ExitCode {
    native::main()
}

#[cfg(not(target_arch = "wasm32"))]
mod native {
    use std::io::{IsTerminal, Write};
    use std::process::ExitCode;

    use clap::{Args, Parser, Subcommand, ValueEnum};
    use forecall::decode::ScheduleKind;
    use forecall::engine::{
        AdapterFrom, Backend, Generate, LoadEvent, LoadOptions, Model, Offer, Offered, Part, Precision, Prompt, Quantize, Sources,
    };
    use forecall::fetch::locator::is_repo_id;
    use forecall::fetch::native::{self, FolderStore, NativeSource, Places};
    use forecall::fetch::remote::Role;
    use forecall::gpu::DeviceOptions;
    use forecall::text::chat_template::ChatRequest;
    use forecall::weights::source::Either;
    use forecall::{Error, Result};
    use serde_json::json;

    #[derive(Parser)]
    #[command(name = "forecall", version, about = "Runs a language model, drafting one call ahead")]
    struct Cli {
        #[command(subcommand)]
        command: Command,
    }

    #[derive(Subcommand)]
    enum Command {
        /// Continue a prompt
        Generate(GenerateArgs),
        /// Print raw head outputs for given tokens
        Logits(LogitsArgs),
        /// Say what a model is, what it needs and what this machine offers
        Info(InfoArgs),
        /// Time calls against their rows
        Bench(BenchArgs),
    }

    #[derive(Args)]
    struct ModelArgs {
        /// Checkpoint folder (config.json, model.safetensors, tokenizer.json), the address of one, or a repository of the
        /// hub, as `owner/name` or `owner/name@revision`
        #[arg(long, value_name = "DIR|URL|REPO")]
        model: String,
        /// Draft adapter's folder, address or repository, or `none`; by default the one beside the weights, if there is one
        #[arg(long, value_name = "DIR|URL|REPO|none")]
        adapter: Option<String>,
        /// Branch, tag or commit of the model's repository
        #[arg(long, value_name = "REVISION")]
        revision: Option<String>,
        /// The hub's address; by default the one in the variable HF_ENDPOINT, else the public one
        #[arg(long, value_name = "URL")]
        hub_url: Option<String>,
        /// Header for the model's server, as `Authorization: Bearer TOKEN`; may be given several times
        #[arg(long, value_name = "NAME: VALUE", value_parser = header)]
        header: Vec<(String, String)>,
        /// Folder in which converted weights from the network are kept, or `none`; by default one among the user's caches
        #[arg(long, value_name = "DIR|none")]
        store: Option<String>,
        /// What runs the model; `auto` is the GPU where there is a real one, else the CPU
        #[arg(long, value_enum, default_value = "auto")]
        backend: BackendArg,
        /// How K/V, and weights that are not quantised, are stored. `auto`: f32 weights stay so, f16 and bf16 become f16
        /// (values beyond 65504 are cut to that); K/V are f32 if all weights are. The backend `reference` keeps K/V in f64
        #[arg(long, value_enum, default_value = "auto")]
        precision: PrecisionArg,
        /// Positions the K/V cache holds; by default the smaller of the model's and 4096
        #[arg(long, value_name = "N")]
        context: Option<usize>,
        /// Turn a plain checkpoint's linear weights into affine groups while loading; by default they are stored as
        /// `precision` says
        #[arg(long, value_enum)]
        quantize: Option<QuantizeArg>,
    }

    /// Headers that say how a request is made and what of a file it asks for, which is not for a caller to say: one of them
    /// leaves the server waiting for a body that never comes, another makes it answer with a part of a config.
    const OUR_HEADERS: [&str; 10] = [
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "if-range",
        "range",
        "te",
        "transfer-encoding",
        "upgrade",
    ];

    /// `name: value`.
    fn header(text: &str) -> std::result::Result<(String, String), String> {
        let (name, value) = text.split_once(':').ok_or("expected NAME: VALUE")?;
        let (name, value) = (name.trim().to_ascii_lowercase(), value.trim());
        if name.is_empty() || !name.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_')) {
            return Err("expected NAME: VALUE, with a name of letters, digits and -".into());
        }
        if value.bytes().any(|c| (c < b' ' && c != b'\t') || c == 0x7f) {
            return Err("a value has no line breaks and no control characters".into());
        }
        match OUR_HEADERS.contains(&name.as_str()) {
            true => Err(format!("the header {name} is set by the program itself")),
            false => Ok((name, value.to_owned())),
        }
    }

    #[derive(Clone, Copy, ValueEnum)]
    enum BackendArg {
        Auto,
        Gpu,
        Cpu,
        Reference,
    }

    #[derive(Clone, Copy, ValueEnum)]
    enum PrecisionArg {
        Auto,
        F32,
        F16,
    }

    #[derive(Clone, Copy, ValueEnum)]
    enum QuantizeArg {
        Q4,
        Q8,
    }

    #[derive(Args)]
    struct GenerateArgs {
        #[command(flatten)]
        model: ModelArgs,
        /// Text to continue
        #[arg(long, conflicts_with = "tokens", required_unless_present = "tokens")]
        prompt: Option<String>,
        /// Render the prompt as a user's message with the model's chat template
        #[arg(long, requires = "prompt", conflicts_with = "tokens")]
        chat: bool,
        /// Further variables of the chat template, as a JSON object: {"enable_thinking": false, "tools": [...]}
        #[arg(long, requires = "chat", conflicts_with = "tokens", value_name = "JSON")]
        template_variables: Option<String>,
        /// Token ids to continue, as `1,2,3`; nothing is added to them
        #[arg(long, value_delimiter = ',', value_name = "IDS")]
        tokens: Option<Vec<u32>>,
        /// New tokens at most
        #[arg(long, default_value_t = 256, value_name = "N")]
        max_tokens: usize,
        /// autoregressive, two-call, two-call-seed, packed, anchored, quadratic, quadratic-shared or block-diffusion; by
        /// default block-diffusion for models trained for nothing else, packed where the model can draft (on the CPU: where
        /// measuring says that it pays), else autoregressive
        #[arg(long)]
        schedule: Option<String>,
        /// Draft tokens verified in one call (K)
        #[arg(long, value_name = "K")]
        verify_width: Option<usize>,
        /// Masks in a draft block (w)
        #[arg(long, value_name = "W")]
        draft_width: Option<usize>,
        /// Draft blocks per call of the anchored schedule (H)
        #[arg(long, value_name = "H")]
        anchors: Option<usize>,
        /// Tokens of a block of block-diffusion, or positions of SetDLM's window (L)
        #[arg(long, value_name = "L")]
        block_length: Option<usize>,
        /// Probability from which guesses of block-diffusion are taken over together; above 1 none is
        #[arg(long, value_name = "P")]
        threshold: Option<f32>,
        /// Steps that fill a block of block-diffusion at most; without a threshold, in equal shares
        #[arg(long, value_name = "N")]
        steps: Option<usize>,
        /// Treat end ids as ordinary tokens
        #[arg(long)]
        ignore_eos: bool,
        /// Text that ends the answer and is no part of it, or a special token such as `<|endoftext|>`; may be given several
        /// times
        #[arg(long, value_name = "TEXT")]
        stop: Vec<String>,
        /// Print one JSON object instead of text
        #[arg(long)]
        json: bool,
    }

    #[derive(Args)]
    struct LogitsArgs {
        #[command(flatten)]
        model: ModelArgs,
        /// Token ids, as `1,2,3`
        #[arg(long, value_delimiter = ',', required = true, value_name = "IDS")]
        tokens: Vec<u32>,
        /// Also print the rows of a draft block with this many masks made after the tokens
        #[arg(long, value_name = "W")]
        draft_width: Option<usize>,
    }

    #[derive(Args)]
    struct InfoArgs {
        #[command(flatten)]
        model: ModelArgs,
        /// Read configs and headers only, and say what loading would fetch and take
        #[arg(long)]
        preflight: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    }

    #[derive(Args)]
    struct BenchArgs {
        #[command(flatten)]
        model: ModelArgs,
        /// Row counts to time
        #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64")]
        rows: Vec<usize>,
        /// Timed rounds; all row counts are visited in each
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    }

    /// Characters of a message at most.
    const MAX_SENTENCE: usize = 1500;

    /// Mesa's Vulkan layer looks for a Wayland display, and complains on stderr in two lines where this variable is missing
    /// (in containers, in jobs), though no window is wanted.
    #[cfg(target_os = "linux")]
    fn quieten_mesa() {
        if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
            // SAFETY: the first thing that `main` does, while there are no other threads.
            unsafe { std::env::set_var("XDG_RUNTIME_DIR", std::env::temp_dir()) };
        }
    }

    pub fn main() -> ExitCode {
        #[cfg(target_os = "linux")]
        quieten_mesa();
        let cli = match Cli::try_parse() {
            Ok(cli) => cli,
            Err(error) => return refuse(&error),
        };
        let outcome = pollster::block_on(async {
            match cli.command {
                Command::Generate(args) => generate(args).await,
                Command::Logits(args) => logits(args).await,
                Command::Info(args) => info(args).await,
                Command::Bench(args) => bench(args).await,
            }
        });
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                tell(&format!("forecall: {}\n", sentence(&error.to_string())));
                ExitCode::FAILURE
            }
        }
    }

    /// One line of bearable length, whatever a path, a file's own names or a template's message hold: no line breaks, and
    /// nothing that a terminal would obey.
    fn sentence(text: &str) -> String {
        let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let line = plain.split_whitespace().collect::<Vec<_>>().join(" ");
        match line.char_indices().nth(MAX_SENTENCE) {
            Some((at, _)) => format!("{}…", line.get(..at).unwrap_or_default()),
            None => line,
        }
    }

    /// Says in one sentence why arguments cannot be read; prints help where that was asked for or nothing was.
    fn refuse(error: &clap::Error) -> ExitCode {
        use clap::error::ErrorKind as Kind;
        if !error.use_stderr() {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        if error.kind() == Kind::DisplayHelpOnMissingArgumentOrSubcommand {
            let _ = error.print();
        } else {
            // The first paragraph says what is wrong; usage and tips follow.
            let text = error.render().to_string();
            let lines: Vec<_> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
            let line = sentence(&lines.join(" "));
            tell(&format!("forecall: {}; see forecall --help\n", line.strip_prefix("error: ").unwrap_or(&line)));
        }
        ExitCode::from(2)
    }

    /// What is taken for a repository may have been meant as a folder.
    fn nor_a_folder(model: &str, error: Error) -> Error {
        match error {
            Error::Http(mut failure)
                if is_repo_id(model)
                    && (failure.missing || failure.status.is_none())
                    && !failure.file.ends_with(".safetensors") =>
            {
                failure.message.push_str(&format!(" Nor is there a folder {model} here."));
                Error::Http(failure)
            }
            other => other,
        }
    }

    fn sources(args: &ModelArgs) -> Result<Sources<NativeSource>> {
        let store = match args.store.as_deref() {
            Some("none") => None,
            Some("") => return Err(Error::InvalidOption("--store is empty; expected a folder, or none".into())),
            Some(folder) => Some(folder.into()),
            None => FolderStore::default_root(),
        };
        let hub = args.hub_url.clone().or_else(|| std::env::var("HF_ENDPOINT").ok().filter(|hub| !hub.is_empty()));
        let mut places = Places { revision: args.revision.clone(), hub, headers: args.header.clone(), store };
        let base = native::open(&args.model, &places, Role::Model)?;
        if let Either::Right(_) = &base {
            let refuse = |what: &str, why: &str| {
                Err(Error::InvalidOption(format!("{what} was given with the folder {}; {why}", args.model)))
            };
            if let Some(revision) = &args.revision {
                return refuse(&format!("revision {revision}"), "only repositories have revisions");
            }
            if !args.header.is_empty() {
                return refuse("--header", "headers are for the server of a model from the network");
            }
        }
        let is_repo = |place: &str| is_repo_id(place) && !std::path::Path::new(place).is_dir();
        if args.hub_url.is_some() && !is_repo(&args.model) && !args.adapter.as_deref().is_some_and(is_repo) {
            return Err(Error::InvalidOption(format!(
                "--hub-url was given, but {} is not looked for on a hub; only repositories (owner/name) are",
                args.model
            )));
        }
        let adapter = match args.adapter.as_deref() {
            None => AdapterFrom::Auto,
            Some("none") => AdapterFrom::None,
            Some(place) => {
                // What is said of the model's source is not meant for another.
                (places.revision, places.headers) = (None, Vec::new());
                AdapterFrom::Source(native::open(place, &places, Role::Adapter)?)
            }
        };
        Ok(Sources { base, adapter })
    }

    fn options(args: &ModelArgs) -> LoadOptions {
        LoadOptions {
            backend: match args.backend {
                BackendArg::Auto => Backend::Auto,
                BackendArg::Gpu => Backend::Gpu,
                BackendArg::Cpu => Backend::Cpu,
                BackendArg::Reference => Backend::Reference,
            },
            precision: match args.precision {
                PrecisionArg::Auto => Precision::Auto,
                PrecisionArg::F32 => Precision::F32,
                PrecisionArg::F16 => Precision::F16,
            },
            quantize: args.quantize.map(|q| match q {
                QuantizeArg::Q4 => Quantize::Q4,
                QuantizeArg::Q8 => Quantize::Q8,
            }),
            context_length: args.context,
            ..LoadOptions::default()
        }
    }

    async fn load(args: &ModelArgs) -> Result<Model> {
        let (mut sources, options) = (sources(args)?, options(args));
        let (mut last, on_terminal) = (String::new(), std::io::stderr().is_terminal());
        let model = Model::load(&mut sources, &options, &mut |event| {
            let line = event.to_string();
            if let LoadEvent::Warning(warning) = &event {
                tell(&format!("{}warning: {}\n", if on_terminal { "\r\x1b[K" } else { "" }, sentence(&warning.message)));
            } else if on_terminal && line != last {
                tell(&format!("\r\x1b[K{line}"));
                last = line;
            }
            true
        })
        .await;
        if on_terminal {
            tell("\r\x1b[K");
        }
        model.map_err(|error| nor_a_folder(&args.model, error))
    }

    /// Why the CPU ran a model that a GPU might have run; nothing else needs saying.
    fn on_cpu(args: &ModelArgs, info: &serde_json::Value) -> String {
        match (args.backend, info["backend"].as_str(), info["backend_reason"].as_str()) {
            (BackendArg::Auto, Some("cpu"), Some(why)) => format!(", on the CPU: {}", sentence(why)),
            _ => String::new(),
        }
    }

    /// `--template-variables`.
    fn template_variables(json: Option<&str>) -> Result<serde_json::Map<String, serde_json::Value>> {
        json.map_or_else(
            || Ok(serde_json::Map::new()),
            |json| {
                let variables = serde_json::from_str(json).map_err(|e| {
                    Error::InvalidOption(format!(
                        "--template-variables is no JSON object such as {{\"enable_thinking\": false}}: {e}"
                    ))
                })?;
                let request = ChatRequest { variables, ..ChatRequest::default() };
                request.check()?;
                Ok(request.variables)
            },
        )
    }

    async fn generate(args: GenerateArgs) -> Result<()> {
        // What is wrong whatever the model, before gigabytes are loaded.
        args.schedule.as_deref().map(str::parse::<ScheduleKind>).transpose()?;
        if args.max_tokens == 0 {
            return Err(Error::InvalidOption("max tokens is 0; ask for at least 1".into()));
        }
        if args.stop.iter().any(String::is_empty) {
            return Err(Error::InvalidOption("a --stop is empty; leave it out".into()));
        }
        let variables = template_variables(args.template_variables.as_deref())?;
        let mut model = load(&args.model).await?;
        let prompt = match (&args.tokens, &args.prompt) {
            (Some(tokens), _) => Prompt::Tokens(tokens.clone()),
            (None, Some(text)) if args.chat => Prompt::Chat(ChatRequest { variables, ..ChatRequest::user(text) }),
            (None, Some(text)) => Prompt::Text(text.clone()),
            (None, None) => return Err(Error::InvalidOption("give --prompt or --tokens".into())),
        };
        let request = Generate {
            max_tokens: args.max_tokens,
            schedule: args.schedule.clone(),
            verify_width: args.verify_width,
            draft_width: args.draft_width,
            anchors: args.anchors,
            block_length: args.block_length,
            threshold: args.threshold,
            steps: args.steps,
            ignore_eos: args.ignore_eos,
            stop: args.stop,
            ..Generate::new(prompt)
        };
        let (streaming, mut written) = (!args.json, Ok(true));
        let done = model
            .generate(&request, &mut |part: &Part| {
                if streaming {
                    written = print(&part.text());
                }
                *written.as_ref().unwrap_or(&false)
            })
            .await?;
        if !written? {
            // Nobody reads on, so nobody waits for the rest.
            return Ok(());
        }
        if args.json {
            print_line(&done.to_json().to_string())?;
        } else {
            if done.text.is_none() {
                let ids: Vec<_> = done.tokens.iter().map(u32::to_string).collect();
                print_line(&ids.join(","))?;
            } else {
                print_line("")?;
            }
            tell(&format!("{}{}\n", done.summary(), on_cpu(&args.model, &model.info())));
        }
        Ok(())
    }

    async fn logits(args: LogitsArgs) -> Result<()> {
        let mut model = load(&args.model).await?;
        let out = model.logits(&args.tokens, args.draft_width).await?;
        let mut object = json!({ "causal": out.causal });
        if let Some(draft) = out.draft {
            object["draft"] = json!(draft);
        }
        print_line(&object.to_string())?;
        Ok(())
    }

    async fn info(args: InfoArgs) -> Result<()> {
        let info = match args.preflight {
            true => {
                let gpu = match options(&args.model).backend {
                    Backend::Gpu | Backend::Auto => Offer::look(DeviceOptions::default()).await?.limits(),
                    Backend::Cpu | Backend::Reference => Offer::default(),
                };
                let offered = Offered { gpu, quota_left: None };
                let preflight = Model::preflight(&mut sources(&args.model)?, &options(&args.model), offered).await;
                preflight.map_err(|error| nor_a_folder(&args.model.model, error))?
            }
            false => load(&args.model).await?.info_with_self_test().await?,
        };
        if args.json {
            print_line(&info.to_string())?;
        } else {
            print_tree(&info, 0)?;
        }
        Ok(())
    }

    async fn bench(args: BenchArgs) -> Result<()> {
        let mut model = load(&args.model).await?;
        let table = model.measure_rows_json(&args.rows, args.rounds).await?;
        print_line(&table.to_string())?;
        Ok(())
    }

    /// Writes to stdout and flushes. A reader that has gone away is not an error of ours: then it is `false`.
    fn print(text: &str) -> Result<bool> {
        let mut stdout = std::io::stdout();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
            Err(error) => Err(Error::Fetch(format!("the output could not be written: {error}"))),
        }
    }

    fn print_line(line: &str) -> Result<()> {
        print(&format!("{line}\n")).map(drop)
    }

    /// Writes to stderr; there is nobody to tell if that fails.
    fn tell(text: &str) {
        let mut stderr = std::io::stderr();
        let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
    }

    /// Prints nested JSON as indented `name: value` lines.
    fn print_tree(value: &serde_json::Value, depth: usize) -> Result<()> {
        let Some(object) = value.as_object() else { return Ok(()) };
        for (name, value) in object {
            let pad = "  ".repeat(depth);
            match value {
                serde_json::Value::Object(_) => {
                    print_line(&format!("{pad}{name}:"))?;
                    print_tree(value, depth + 1)?;
                }
                serde_json::Value::String(text) => print_line(&format!("{pad}{name}: {text}"))?,
                other => print_line(&format!("{pad}{name}: {other}"))?,
            }
        }
        Ok(())
    }
}
