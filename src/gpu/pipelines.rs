//! Compiled kernels, each once.

use std::collections::HashMap;

use super::device::Gpu;
use super::variants::{Access, Kernel};
use crate::error::Result;

/// Names a compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PipelineId(usize);

/// All kernels a model has asked for so far.
#[derive(Debug)]
pub(super) struct Pipelines {
    gpu: Gpu,
    compiled: Vec<wgpu::ComputePipeline>,
    ids: HashMap<String, PipelineId>,
    layouts: HashMap<Vec<(u32, Access)>, (wgpu::BindGroupLayout, wgpu::PipelineLayout)>,
}

impl Pipelines {
    pub(super) fn new(gpu: Gpu) -> Self {
        Self { gpu, compiled: Vec::new(), ids: HashMap::new(), layouts: HashMap::new() }
    }

    /// How many kernels are compiled.
    pub(super) fn len(&self) -> usize {
        self.compiled.len()
    }

    fn layouts(&mut self, bindings: &[(u32, Access)]) -> &(wgpu::BindGroupLayout, wgpu::PipelineLayout) {
        let device = &self.gpu.device;
        self.layouts.entry(bindings.to_vec()).or_insert_with(|| {
            let entries: Vec<_> = bindings
                .iter()
                .map(|&(binding, access)| wgpu::BindGroupLayoutEntry {
                    binding,
                    visibility: wgpu::ShaderStages::COMPUTE,
                    ty: wgpu::BindingType::Buffer {
                        ty: match access {
                            Access::Uniform => wgpu::BufferBindingType::Uniform,
                            Access::Read => wgpu::BufferBindingType::Storage { read_only: true },
                            Access::Write => wgpu::BufferBindingType::Storage { read_only: false },
                        },
                        has_dynamic_offset: false,
                        min_binding_size: None,
                    },
                    count: None,
                })
                .collect();
            let group = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries });
            let pipeline = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&group)],
                immediate_size: 0,
            });
            (group, pipeline)
        })
    }

    /// A bind group for kernels with these bindings; `resources` in the same order.
    pub(super) fn bind(
        &mut self,
        label: &str,
        bindings: &[(u32, Access)],
        resources: Vec<wgpu::BufferBinding<'_>>,
    ) -> wgpu::BindGroup {
        let device = self.gpu.device.clone();
        let (layout, _) = self.layouts(bindings);
        let entries: Vec<_> = bindings
            .iter()
            .zip(resources)
            .map(|(&(binding, _), buffer)| wgpu::BindGroupEntry { binding, resource: wgpu::BindingResource::Buffer(buffer) })
            .collect();
        device.create_bind_group(&wgpu::BindGroupDescriptor { label: Some(label), layout, entries: &entries })
    }

    /// The compiled kernel; compiles it if it is new.
    ///
    /// # Errors
    /// [`crate::Error::Internal`] if it cannot be linked or the compiler refuses it.
    pub(super) fn id(&mut self, kernel: &Kernel) -> Result<PipelineId> {
        let key = kernel.key();
        if let Some(&id) = self.ids.get(&key) {
            return Ok(id);
        }
        let source = kernel.source(self.gpu.header(kernel.f16, kernel.subgroups))?;
        let module = self.gpu.device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(&key),
            source: wgpu::ShaderSource::Wgsl(source.into()),
        });
        let device = self.gpu.device.clone();
        let (_, layout) = self.layouts(&kernel.bindings);
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&key),
            layout: Some(layout),
            module: &module,
            entry_point: Some("main"),
            // Every kernel writes its workgroup memory before it reads it.
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        self.gpu.check()?;
        let id = PipelineId(self.compiled.len());
        self.compiled.push(pipeline);
        self.ids.insert(key, id);
        Ok(id)
    }

    /// The pipeline of an id that [`Pipelines::id`] gave out.
    pub(super) fn get(&self, id: PipelineId) -> Option<&wgpu::ComputePipeline> {
        self.compiled.get(id.0)
    }
}
