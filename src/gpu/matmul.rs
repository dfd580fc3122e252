//! Matrix products: which compiled kernel a product uses, its parameters and its grid. The kernels are `shaders/matmul.wgsl`
//! and, for long inputs on GPUs, `shaders/matmul_prefill.wgsl`, which gives the same bits.

use super::shader::{Setting, Value};
use crate::model::program::{Arrangement, LoraB, RowSet};
use crate::weights::packed::{Format, PackedRows, ScaleFormat, TILE};

/// The part of a product that one workgroup and one thread own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows of a thread: each weight it loads and unpacks serves all of them.
    pub rows: u32,
    /// Tiles of 8 outputs of a thread (one output of each): each input it loads serves all of them.
    pub outputs: u32,
    /// Groups of threads side by side along the outputs.
    pub columns: u32,
    /// Threads that share the inputs of an output between them. The only one of these numbers that results depend on:
    /// the same for every row count on a device.
    pub k_lanes: u32,
    /// Subgroup lanes that hand each other the inputs (4 or 8); `None`: every thread reads its own.
    pub share: Option<u32>,
    /// Whether weights and inputs are staged in workgroup memory: `shaders/matmul_prefill.wgsl`, whose tile is
    /// [`Tile::staged`].
    pub staged: bool,
}

impl Tile {
    /// The tile of the staged kernel, which adds in the order of `k_lanes` k-lanes.
    #[must_use]
    pub fn staged(k_lanes: u32) -> Self {
        Self { rows: 64, outputs: 1, columns: 8, k_lanes, share: None, staged: true }
    }

    /// Invocations of a workgroup.
    #[must_use]
    pub fn invocations(self) -> u32 {
        if self.staged { 128 } else { 8 * self.columns * self.k_lanes }
    }

    /// Outputs of a workgroup.
    #[must_use]
    pub fn outputs_per_workgroup(self) -> u32 {
        8 * self.outputs * self.columns
    }

    /// Workgroups for `rows` rows and `n` outputs: row chunks along x, so that those that share weights run together;
    /// outputs along y, and along z what exceeds 65535.
    #[must_use]
    pub fn grid(self, rows: u32, n: u32) -> [u32; 3] {
        let groups = n.div_ceil(self.outputs_per_workgroup());
        let y = groups.min(65535);
        [rows.div_ceil(self.rows), y, groups.div_ceil(y.max(1))]
    }

    /// Rows whose partial sums are added up at a time, so that they take at most 8 KB of workgroup memory (16 where a
    /// single row needs it).
    fn pass_rows(self) -> u32 {
        let fits = |p: &u32| self.rows.is_multiple_of(*p) && self.invocations() * p * self.outputs * 4 <= 8192;
        (1..=self.rows).rev().find(fits).unwrap_or(1)
    }
}

/// What kind of device the tiles are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceClass {
    /// A software adapter: a workgroup is a loop over SIMD vectors of lanes.
    Cpu {
        /// Its subgroup size, if shaders may use subgroups and it is 4 or 8.
        subgroup: Option<u32>,
    },
    /// A real GPU.
    Gpu,
}

/// K-lanes on GPUs: enough threads for one row of a small matrix, and a block or more for each of them in its inputs.
const GPU_K_LANES: u32 = 8;

/// Rows of a workgroup that kernels are compiled for: few, so that a new width seldom meets a new kernel.
const ROWS: [u32; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// `rows` rows in as few equal chunks of at most `most` as will do: rows of a chunk, rounded up to one of [`ROWS`].
fn chunk(rows: u32, most: u32) -> u32 {
    let rows = rows.max(1);
    let equal = rows.div_ceil(rows.div_ceil(most));
    ROWS.into_iter().find(|&r| r >= equal).unwrap_or(most)
}

/// The tile for `rows` rows and `n` outputs on a device.
///
/// A software adapter pays for every lane of every load, so its tiles are as large as its compiler bears: lavapipe's
/// (subgroups of 8) bears much, SwiftShader's (4) takes minutes and gigabytes for kernels of twice the size given here. A GPU's are
/// bounded by registers: `rows * outputs` sums, `4 * outputs` weights and as many packed words stay live, 64 registers in
/// all, which every vendor gives a thread at half occupancy or better; and by the number of workgroups a small `n` leaves
/// to fill the device with.
#[must_use]
pub fn tile(class: DeviceClass, rows: u32, n: u32) -> Tile {
    match class {
        DeviceClass::Cpu { subgroup: Some(4) } => {
            Tile { rows: chunk(rows, 4), outputs: 2, columns: 1, k_lanes: 1, share: Some(4), staged: false }
        }
        DeviceClass::Cpu { subgroup } => {
            let rows = chunk(rows, 8);
            let outputs = if rows > 4 && subgroup.is_some() { 4 } else { 8 };
            let columns = if n >= 1024 { 2 } else { 1 };
            Tile { rows, outputs, columns, k_lanes: 1, share: subgroup, staged: false }
        }
        DeviceClass::Gpu => {
            const WORKGROUPS: u32 = 64;
            // Where no more than a quarter of the staged kernel's rows would be idle.
            if rows.next_multiple_of(64) * 3 <= rows * 4 {
                return Tile::staged(GPU_K_LANES);
            }
            let most = match chunk(rows, 16) {
                1..=2 | 12..=16 => 2,
                _ => 4,
            };
            let chunks = rows.max(1).div_ceil(chunk(rows, 16));
            let fills = |outputs: &u32| n / (8 * outputs) * chunks >= WORKGROUPS;
            let outputs = [4, 2].into_iter().filter(|&o| o <= most).find(fills).unwrap_or(1);
            Tile { rows: chunk(rows, 16), outputs, columns: 1, k_lanes: GPU_K_LANES, share: None, staged: false }
        }
    }
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputKind {
    /// Stored.
    Store,
    /// Added to the residual stream.
    Residual,
    /// Gate and up combined.
    SwiGlu,
}

/// One compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Storage of the weights; the group does not matter.
    pub weight: Format,
    /// Whether rows are divided by their RMS.
    pub norm: bool,
    /// Whether a bias is added.
    pub bias: bool,
    /// Storage of LoRA's B (f16 or f32), if it is added.
    pub lora: Option<Format>,
    /// What becomes of the product.
    pub output: OutputKind,
    /// Geometry.
    pub tile: Tile,
}

impl Variant {
    /// The kernel's file under `shaders/`.
    #[must_use]
    pub fn file(&self) -> &'static str {
        if self.tile.staged { "matmul_prefill.wgsl" } else { "matmul.wgsl" }
    }

    /// Settings of [`Variant::file`].
    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        let weights = match self.weight {
            Format::Affine { bits: 4, .. } => "shared/weights_q4.wgsl",
            Format::Affine { .. } => "shared/weights_q8.wgsl",
            Format::F16 => "shared/weights_f16.wgsl",
            Format::F32 => "shared/weights_f32.wgsl",
        };
        let lora = match self.lora {
            None => "matmul/lora_none.wgsl",
            Some(Format::F32) => "matmul/lora_f32.wgsl",
            Some(_) => "matmul/lora_f16.wgsl",
        };
        let output = match self.output {
            OutputKind::Store => "matmul/output_store.wgsl",
            OutputKind::Residual => "matmul/output_residual.wgsl",
            OutputKind::SwiGlu => "matmul/output_swiglu.wgsl",
        };
        let mut settings = vec![
            ("weights", Value::Text(weights)),
            ("norm", Value::Text(if self.norm { "matmul/norm_rms.wgsl" } else { "matmul/norm_none.wgsl" })),
            ("bias", Value::Text(if self.bias { "matmul/bias_add.wgsl" } else { "matmul/bias_none.wgsl" })),
            ("lora", Value::Text(lora)),
            ("output", Value::Text(output)),
            ("KL", Value::U32(self.tile.k_lanes)),
        ];
        if !self.tile.staged {
            settings.extend([
                ("R", Value::U32(self.tile.rows)),
                ("NO", Value::U32(self.tile.outputs)),
                ("COLUMNS", Value::U32(self.tile.columns)),
                ("PASS_ROWS", Value::U32(self.tile.pass_rows())),
            ]);
        }
        match self.weight {
            Format::Affine { scale, .. } => settings.push((
                "scale",
                Value::Text(match scale {
                    ScaleFormat::F16 => "shared/scale_f16.wgsl",
                    ScaleFormat::Bf16 => "shared/scale_bf16.wgsl",
                }),
            )),
            Format::F16 | Format::F32 => settings.push(("scales", Value::Text("matmul/scales_none.wgsl"))),
        }
        if let Some(lanes) = self.tile.share {
            settings.push(("inputs", Value::Text("matmul/inputs_shuffle.wgsl")));
            settings.push(("SUBGROUP", Value::U32(lanes)));
        }
        settings
    }

    /// The bindings it reads, in order; its bind group holds these and no others.
    #[must_use]
    pub fn bindings(&self) -> Vec<Binding> {
        let mut list = vec![Binding::Params, Binding::Call, Binding::Weights];
        if matches!(self.weight, Format::Affine { .. }) {
            list.push(Binding::Scales);
        }
        list.push(Binding::Input);
        if self.norm {
            list.push(Binding::NormInput);
        }
        list.push(Binding::Output);
        if self.bias || self.output == OutputKind::Residual {
            list.push(Binding::Vectors);
        }
        if self.lora.is_some() {
            list.extend([Binding::LoraB, Binding::Lora]);
        }
        if self.output == OutputKind::Residual {
            list.push(Binding::Hidden);
        }
        list
    }
}

/// A binding of the kernel; its number is the discriminant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Binding {
    /// [`Params`], uniform.
    Params = 0,
    /// The header of the call's rows ([`crate::model::call_rows`]), uniform, 64 bytes.
    Call = 1,
    /// Weight blocks, storage, read.
    Weights = 2,
    /// Scale and bias pairs, storage, read.
    Scales = 3,
    /// Input activations, storage, read.
    Input = 4,
    /// H of the rows to normalise by, storage, read.
    NormInput = 5,
    /// Where the product goes (X, for [`OutputKind::Residual`]), storage, written.
    Output = 6,
    /// Biases and gains, storage, read.
    Vectors = 7,
    /// Blocks of LoRA's B, storage, read.
    LoraB = 8,
    /// LoRA's inner activations, storage, read.
    Lora = 9,
    /// H that the product is added to, storage, read and written.
    Hidden = 10,
}

/// Parameters of one product, as the shader reads them. Strides count values and are multiples of 4.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Outputs.
    pub n: u32,
    /// Blocks along the inputs.
    pub blocks: u32,
    /// Scale groups along the inputs.
    pub groups: u32,
    /// Runs along the inputs; a run is what one k-lane takes at a time.
    pub runs: u32,
    /// Blocks of a run.
    pub run_blocks: u32,
    /// Runs that share a scale.
    pub runs_per_group: u32,
    /// Row stride of the input.
    pub input_stride: u32,
    /// Row stride of the output.
    pub output_stride: u32,
    /// Rows covered: 0 all, 1 adapter's, 2 choosing.
    pub row_set: u32,
    /// D, for norms.
    pub hidden: u32,
    /// Row stride of H.
    pub hidden_stride: u32,
    /// Added to the mean square.
    pub eps: f32,
    /// Where the bias starts in the vectors.
    pub bias_at: u32,
    /// Where the gain starts in the vectors.
    pub gain_at: u32,
    /// Blocks along the ranks of LoRA's B.
    pub lora_blocks: u32,
    /// Rank; a multiple of 4.
    pub lora_rank: u32,
    /// Row stride of LoRA's inner activations.
    pub lora_stride: u32,
    /// `lora_alpha / r`.
    pub lora_scale: f32,
    /// 1 if the segment of output `o` is `o % 2`.
    pub lora_interleaved: u32,
    /// First output of the second segment.
    pub segment_1: u32,
    /// First output of the third segment.
    pub segment_2: u32,
    /// Zero, for a product that must be rounded before it is added to.
    pub zero: f32,
    /// Zero.
    pub pad: [u32; 2],
}

impl Params {
    /// Sizes of the weights, read by `tile`'s kernel.
    #[must_use]
    pub fn new(weight: &PackedRows, tile: Tile) -> Self {
        let blocks = weight.blocks() as u32;
        let group_blocks = weight.format.group().map_or(4, |g| (g / weight.format.values_per_block()) as u32);
        let run_blocks = if tile.k_lanes == 1 { group_blocks } else { 1 };
        Self {
            n: weight.n as u32,
            blocks,
            groups: weight.groups() as u32,
            runs: blocks.div_ceil(run_blocks),
            run_blocks,
            runs_per_group: group_blocks / run_blocks,
            ..Self::default()
        }
    }

    /// Adds LoRA's part; B holds `ranks_per_block` ranks in a block.
    pub fn set_lora(&mut self, lora: &LoraB, b: Format, stride: u32) {
        self.lora_blocks = lora.rank.div_ceil(b.values_per_block()) as u32;
        self.lora_rank = lora.rank as u32;
        self.lora_stride = stride;
        self.lora_scale = lora.scale;
        self.lora_interleaved = u32::from(lora.arrangement == Arrangement::Interleaved);
        [self.segment_1, self.segment_2] = lora.segment_starts.map(|s| s as u32);
    }

    /// Sets the rows covered.
    pub fn set_rows(&mut self, rows: RowSet) {
        self.row_set = match rows {
            RowSet::All => 0,
            RowSet::Adapter => 1,
            RowSet::Choose => 2,
        };
    }
}

/// Variants that between them show every file and switch of the kernel, for validation.
#[must_use]
pub fn examples(formats: &[Format]) -> Vec<Variant> {
    let mut list = Vec::new();
    let cpu = |subgroup| DeviceClass::Cpu { subgroup };
    for class in [DeviceClass::Gpu, cpu(None), cpu(Some(4)), cpu(Some(8))] {
        for (rows, n) in [(1, 64), (1, 4096), (2, 64), (3, 4096), (4, 64), (6, 64), (8, 4096), (11, 64), (16, 4096), (64, 64)] {
            for &weight in formats {
                let tile = tile(class, rows, n);
                let lora = Some(if rows == 1 { Format::F32 } else { Format::F16 });
                list.push(Variant { weight, norm: true, bias: true, lora, output: OutputKind::Store, tile });
                list.push(Variant { weight, norm: false, bias: false, lora: None, output: OutputKind::Residual, tile });
                list.push(Variant { weight, norm: true, bias: false, lora, output: OutputKind::SwiGlu, tile });
            }
        }
    }
    list
}

/// Outputs of a workgroup are whole tiles of the packed layout.
const _: () = assert!(TILE == 8);

#[cfg(test)]
mod tests {
    use naga::valid::FunctionInfo;
    use naga::{BinaryOperator, Expression, Handle, LocalVariable, ScalarKind, Statement};

    use super::*;
    use crate::gpu::shader::Header;
    use crate::gpu::variants;

    /// Sums of floats one of whose terms is a product, itself or by way of a variable: a compiler may fuse them or not.
    fn left_to_the_compiler(module: &naga::Module, function: &naga::Function, info: &FunctionInfo) -> Vec<String> {
        fn local(function: &naga::Function, mut at: Handle<Expression>) -> Option<Handle<LocalVariable>> {
            loop {
                match function.expressions[at] {
                    Expression::Access { base, .. } | Expression::AccessIndex { base, .. } => at = base,
                    Expression::LocalVariable(variable) => return Some(variable),
                    _ => return None,
                }
            }
        }
        fn stores(block: &naga::Block, found: &mut Vec<(Handle<Expression>, Handle<Expression>)>) {
            for statement in block {
                match statement {
                    Statement::Store { pointer, value } => found.push((*pointer, *value)),
                    Statement::Block(block) => stores(block, found),
                    Statement::If { accept, reject, .. } => [accept, reject].into_iter().for_each(|block| stores(block, found)),
                    Statement::Loop { body, continuing, .. } => {
                        [body, continuing].into_iter().for_each(|block| stores(block, found));
                    }
                    Statement::Switch { cases, .. } => cases.iter().for_each(|case| stores(&case.body, found)),
                    _ => {}
                }
            }
        }
        let is_product = |at: Handle<Expression>| {
            let float = info[at].ty.inner_with(&module.types).scalar_kind() == Some(ScalarKind::Float);
            float && matches!(function.expressions[at], Expression::Binary { op: BinaryOperator::Multiply, .. })
        };
        let mut stored = Vec::new();
        stores(&function.body, &mut stored);
        let products: Vec<_> =
            stored.into_iter().filter(|(_, value)| is_product(*value)).filter_map(|(to, _)| local(function, to)).collect();
        let mut found = Vec::new();
        for (_, expression) in function.expressions.iter() {
            let &Expression::Binary { op: BinaryOperator::Add | BinaryOperator::Subtract, left, right } = expression else {
                continue;
            };
            for term in [left, right] {
                let by_way = match function.expressions[term] {
                    Expression::Load { pointer } => local(function, pointer).filter(|variable| products.contains(variable)),
                    _ => None,
                };
                if is_product(term) {
                    found.push("a product".into());
                } else if let Some(variable) = by_way {
                    found.push(function.local_variables[variable].name.clone().unwrap_or_default());
                }
            }
        }
        found
    }

    #[test]
    fn no_sum_is_left_to_the_compiler_to_fuse() {
        let look = |text: &str| {
            let module = naga::front::wgsl::parse_str(text).unwrap_or_else(|e| panic!("{}", e.emit_to_string(text)));
            let flags = naga::valid::ValidationFlags::all();
            let info = naga::valid::Validator::new(flags, naga::valid::Capabilities::all()).validate(&module).unwrap();
            let mut found = left_to_the_compiler(&module, &module.entry_points[0].function, info.get_entry_point(0));
            for (handle, function) in module.functions.iter() {
                found.extend(left_to_the_compiler(&module, function, &info[handle]));
            }
            found
        };
        let affine = |bits| Format::Affine { bits, group: 32, scale: ScaleFormat::F16 };
        let mut staged = 0;
        for variant in examples(&[affine(4), affine(8), Format::F16]).into_iter().filter(|v| v.tile.rows <= 2 || v.tile.staged) {
            let text = variants::product(&variant).source(Header::default()).unwrap();
            assert_eq!(look(&text), Vec::<String>::new(), "{variant:?}");
            // Controls: the products as they would be written without a thought.
            if variant.tile.staged && variant.norm {
                staged += 1;
                let at = text.find("acc[0u] = scaled(acc[0u], ").expect("the norm's product");
                let end = at + text[at..].find(';').unwrap();
                let careless = format!("{}acc[0u] *= inverse_rms[down * 8u]{}", &text[..at], &text[end..]);
                let found = look(&careless);
                assert!(!found.is_empty() && found.iter().all(|name| name == "acc"), "control: {found:?}");
                let careless =
                    text.replace("return fma(x, vec4<f32>(factor), vec4<f32>(params.zero));", "return x * factor + params.zero;");
                assert_eq!(look(&careless), ["a product"], "control");
            }
        }
        assert!(staged > 0);
    }

    #[test]
    fn grids_cover_everything_and_stay_within_limits() {
        let cpu = |subgroup| DeviceClass::Cpu { subgroup };
        for class in [DeviceClass::Gpu, cpu(None), cpu(Some(4)), cpu(Some(8))] {
            let k_lanes = tile(class, 1, 64).k_lanes;
            for rows in 1..=130 {
                for n in [1, 8, 63, 576, 3072, 151_936, 5_000_000] {
                    let tile = tile(class, rows, n);
                    let [x, y, z] = tile.grid(rows, n);
                    assert!(x * tile.rows >= rows && (x - 1) * tile.rows < rows, "{tile:?} {rows}");
                    assert!(
                        u64::from(y) * u64::from(z) * u64::from(tile.outputs_per_workgroup()) >= u64::from(n),
                        "{tile:?} {n}"
                    );
                    assert!(x <= 65535 && y <= 65535 && z <= 65535);
                    assert!(tile.invocations() <= 256 && (tile.staged || tile.rows * tile.outputs <= 64));
                    assert_eq!(tile.k_lanes, k_lanes, "results would depend on the rows or on n");
                    assert_eq!(tile.rows % tile.pass_rows(), 0);
                }
            }
        }
        assert_eq!([1, 5, 9, 13, 16, 17, 33, 64].map(|rows| chunk(rows, 16)), [1, 6, 12, 16, 16, 12, 12, 16]);
        assert_eq!([1, 5, 9, 13, 16, 17, 64].map(|rows| chunk(rows, 8)), [1, 6, 6, 8, 8, 6, 8]);
    }
}
