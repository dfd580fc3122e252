//! A device with the matmul kernel on it: what the tests and the benchmark of that kernel share.

use std::collections::HashMap;

use forecall::gpu::matmul::{Binding, DeviceClass, Params, Variant};
use forecall::gpu::shader::{self, Header};
use forecall::gpu::variants::{self, Access, Kernel};
use forecall::weights::packed::{Format, PackedRows, ScaleFormat};
use wgpu::util::DeviceExt;

/// A file under `shaders/`, read from the source tree.
fn shader_file(path: &str) -> Option<&'static str> {
    let text = std::fs::read_to_string(format!("{}/shaders/{path}", env!("CARGO_MANIFEST_DIR"))).ok()?;
    Some(Box::leak(text.into_boxed_str()))
}

/// The text of a kernel's module.
pub fn module_text(kernel: &Kernel) -> String {
    let header = Header { f16: kernel.f16, subgroups: false };
    shader::link(kernel.file, &kernel.settings, header, &shader_file).expect("the kernel links")
}

pub struct Rig {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    #[allow(dead_code, reason = "the tests name no adapter")]
    pub info: wgpu::AdapterInfo,
    pub class: DeviceClass,
    pipelines: HashMap<Variant, wgpu::ComputePipeline>,
}

/// One product ready to run.
pub struct Prepared {
    pipeline: wgpu::ComputePipeline,
    group: wgpu::BindGroup,
    grid: [u32; 3],
}

impl Rig {
    /// The first adapter found, under WebGPU's default limits.
    pub fn new() -> Self {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
        let adapter = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
            .expect("these checks need a Vulkan, Metal or DX12 adapter; Mesa's lavapipe will do");
        let info = adapter.get_info();
        let subgroups = adapter.features() & wgpu::Features::SUBGROUP;
        let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
            required_features: adapter.features() & (wgpu::Features::SUBGROUP | wgpu::Features::SHADER_F16),
            required_limits: wgpu::Limits::default(),
            ..Default::default()
        }))
        .expect("a device with the default limits");
        let class = if info.device_type == wgpu::DeviceType::Cpu {
            let size = info.subgroup_min_size;
            let usable = !subgroups.is_empty() && info.subgroup_max_size == size && matches!(size, 4 | 8);
            DeviceClass::Cpu { subgroup: usable.then_some(size) }
        } else {
            DeviceClass::Gpu
        };
        Self { device, queue, info, class, pipelines: HashMap::new() }
    }

    pub fn buffer(&self, contents: &[u8]) -> wgpu::Buffer {
        self.device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: None,
            contents: if contents.is_empty() { &[0; 16] } else { contents },
            usage: wgpu::BufferUsages::STORAGE
                | wgpu::BufferUsages::UNIFORM
                | wgpu::BufferUsages::COPY_SRC
                | wgpu::BufferUsages::COPY_DST,
        })
    }

    /// Compiles a kernel as the product does, but from the source tree.
    fn compile(&self, kernel: &Kernel) -> wgpu::ComputePipeline {
        let source = wgpu::ShaderSource::Wgsl(module_text(kernel).into());
        let module = self.device.create_shader_module(wgpu::ShaderModuleDescriptor { label: None, source });
        let entries: Vec<_> = kernel.bindings.iter().map(|&(binding, access)| layout_entry(binding, access)).collect();
        let layout = self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries });
        let layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &[Some(&layout)],
            ..Default::default()
        });
        self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: Some(&layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        })
    }

    #[allow(dead_code, reason = "products have `prepare`")]
    /// Any kernel, with a buffer for each of its bindings in their order.
    pub fn prepare_kernel(&self, kernel: &Kernel, buffers: &[&wgpu::Buffer], grid: [u32; 3]) -> Prepared {
        let pipeline = self.compile(kernel);
        let entries: Vec<_> = kernel
            .bindings
            .iter()
            .zip(buffers)
            .map(|(&(binding, _), buffer)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        let layout = pipeline.get_bind_group_layout(0);
        let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout: &layout, entries: &entries });
        Prepared { pipeline, group, grid }
    }

    /// `buffer_of` names the buffer of each binding but the parameters.
    pub fn prepare(
        &mut self,
        variant: &Variant,
        params: &Params,
        rows: u32,
        buffer_of: impl Fn(Binding) -> wgpu::Buffer,
    ) -> Prepared {
        let pipeline = match self.pipelines.get(variant) {
            Some(known) => known.clone(),
            None => self.compile(&variants::product(variant)),
        };
        self.pipelines.insert(*variant, pipeline.clone());
        let params_buffer = self.buffer(bytemuck::bytes_of(params));
        let buffers: Vec<_> = variant
            .bindings()
            .into_iter()
            .map(|b| (b, if b == Binding::Params { params_buffer.clone() } else { buffer_of(b) }))
            .collect();
        let entries: Vec<_> = buffers
            .iter()
            .map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding: *binding as u32,
                resource: match binding {
                    Binding::Call => wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer,
                        offset: 0,
                        size: std::num::NonZeroU64::new(64),
                    }),
                    _ => buffer.as_entire_binding(),
                },
            })
            .collect();
        let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        Prepared { pipeline, group, grid: variant.tile.grid(rows, params.n) }
    }

    /// Seconds that a run of `prepared` takes, of `times` in a row; of processor time, if that is asked for and told.
    #[allow(dead_code, reason = "only benchmarks take time")]
    pub fn seconds(&self, prepared: &Prepared, times: usize, cpu_time: bool) -> f64 {
        let before = cpu_seconds();
        let passed = self.run(prepared, times);
        let worked = before.zip(cpu_seconds()).filter(|_| cpu_time).map(|(before, after)| after - before);
        worked.unwrap_or(passed) / times as f64
    }

    /// Runs `prepared` `times` times and waits; seconds from submit to done.
    pub fn run(&self, prepared: &Prepared, times: usize) -> f64 {
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(&prepared.pipeline);
            pass.set_bind_group(0, &prepared.group, &[]);
            for _ in 0..times {
                let [x, y, z] = prepared.grid;
                pass.dispatch_workgroups(x, y, z);
            }
        }
        let commands = encoder.finish();
        let start = std::time::Instant::now();
        self.queue.submit([commands]);
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device answers");
        start.elapsed().as_secs_f64()
    }

    #[allow(dead_code, reason = "the benchmark reads nothing back")]
    pub fn read(&self, buffer: &wgpu::Buffer) -> Vec<f32> {
        let copy = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: buffer.size(),
            usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
            mapped_at_creation: false,
        });
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(buffer, 0, &copy, 0, buffer.size());
        self.queue.submit([encoder.finish()]);
        copy.map_async(wgpu::MapMode::Read, .., |result| result.expect("the buffer maps"));
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device answers");
        let view = copy.get_mapped_range(..).expect("the buffer is mapped");
        bytemuck::pod_collect_to_vec(&view)
    }
}

/// Seconds that this process's threads have run, where the system says (Linux): on a software adapter the work itself,
/// whoever else keeps the machine busy.
#[allow(dead_code, reason = "only benchmarks take time")]
fn cpu_seconds() -> Option<f64> {
    let mut total = 0.0;
    for task in std::fs::read_dir("/proc/self/task").ok()? {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        total += text.split_whitespace().next()?.parse::<f64>().ok()? * 1e-9;
    }
    Some(total)
}

/// A deterministic stream of numbers.
pub struct Random(pub u64);

impl Random {
    pub fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// In -0.5..0.5.
    pub fn value(&mut self) -> f32 {
        self.word() as f32 / u32::MAX as f32 - 0.5
    }

    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }
}

#[allow(dead_code, reason = "attention has no matrix")]
/// A random matrix; what lies beyond `n` and `k` is zero, as the packed layout has it.
pub fn matrix(format: Format, n: usize, k: usize, random: &mut Random) -> PackedRows {
    let mut m = PackedRows { format, first_row: 0, n, k, data: vec![], scales: vec![] };
    let (tiles, per_block) = (n.div_ceil(8), format.values_per_block());
    let (blocks, groups) = (m.blocks(), m.groups());
    m.data = vec![0; tiles * blocks * 32];
    m.scales = vec![0; tiles * groups * 8];
    let size = 1.7 / (k as f32).sqrt();
    for row in 0..n {
        let (tile, lane) = (row / 8, row % 8);
        if let Format::Affine { bits, scale, .. } = format {
            for group in 0..groups {
                let levels = ((1u32 << bits) - 1) as f32;
                let s = size * 2.0 / levels * (1.0 + 0.6 * random.value());
                let half = |v: f32| match scale {
                    ScaleFormat::F16 => half::f16::from_f32(v).to_bits(),
                    ScaleFormat::Bf16 => half::bf16::from_f32(v).to_bits(),
                };
                let pair = u32::from(half(s)) | u32::from(half(-s * levels * (0.5 + 0.2 * random.value()))) << 16;
                m.scales[(tile * groups + group) * 8 + lane] = pair;
            }
        }
        for i in 0..k {
            let at = ((tile * blocks + i / per_block) * 8 + lane) * 4;
            let inside = i % per_block;
            match format {
                Format::F32 => m.data[at + inside] = (2.0 * size * random.value()).to_bits(),
                Format::F16 => {
                    let bits = half::f16::from_f32(2.0 * size * random.value()).to_bits();
                    m.data[at + inside / 2] |= u32::from(bits) << (16 * (inside % 2));
                }
                Format::Affine { bits: 4, .. } => {
                    m.data[at + inside / 8] |= (random.word() >> 28) << (8 * (inside % 4) + 4 * (inside % 8 / 4));
                }
                Format::Affine { .. } => m.data[at + inside / 4] |= (random.word() >> 24) << (8 * (inside % 4)),
            }
        }
    }
    m
}

fn layout_entry(binding: u32, access: Access) -> wgpu::BindGroupLayoutEntry {
    let ty = match access {
        Access::Uniform => wgpu::BufferBindingType::Uniform,
        _ => wgpu::BufferBindingType::Storage { read_only: access == Access::Read },
    };
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
        count: None,
    }
}
