//! Compiled kernels, each once for a device: models loaded later find them there.

use std::collections::HashMap;

use super::device::Gpu;
use super::variants::{Access, Kernel};
use crate::error::Result;

/// Compiled kernels and layouts of a device.
#[derive(Debug, Default)]
pub(super) struct PipelineCache {
    compiled: HashMap<String, wgpu::ComputePipeline>,
    layouts: HashMap<Vec<(u32, Access)>, (wgpu::BindGroupLayout, wgpu::PipelineLayout)>,
}

/// Names a compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PipelineId(usize);

/// All kernels a model has asked for so far.
#[derive(Debug)]
pub(super) struct Pipelines {
    gpu: Gpu,
    compiled: Vec<wgpu::ComputePipeline>,
    ids: HashMap<String, PipelineId>,
}

impl Pipelines {
    pub(super) fn new(gpu: Gpu) -> Self {
        Self { gpu, compiled: Vec::new(), ids: HashMap::new() }
    }

    /// How many kernels are compiled.
    pub(super) fn len(&self) -> usize {
        self.compiled.len()
    }

    fn layouts(&self, bindings: &[(u32, Access)]) -> (wgpu::BindGroupLayout, wgpu::PipelineLayout) {
        let device = &self.gpu.device;
        let mut cache = self.gpu.pipeline_cache();
        let make = || {
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
        };
        cache.layouts.entry(bindings.to_vec()).or_insert_with(make).clone()
    }

    /// A bind group for kernels with these bindings; `resources` in the same order.
    pub(super) fn bind(
        &self,
        label: &str,
        bindings: &[(u32, Access)],
        resources: Vec<wgpu::BufferBinding<'_>>,
    ) -> wgpu::BindGroup {
        let (layout, _) = self.layouts(bindings);
        let entries: Vec<_> = bindings
            .iter()
            .zip(resources)
            .map(|(&(binding, _), buffer)| wgpu::BindGroupEntry { binding, resource: wgpu::BindingResource::Buffer(buffer) })
            .collect();
        self.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor { label: Some(label), layout: &layout, entries: &entries })
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
        let found = self.gpu.pipeline_cache().compiled.get(&key).cloned();
        let pipeline = match found {
            Some(pipeline) => pipeline,
            None => self.compile(kernel, &key)?,
        };
        let id = PipelineId(self.compiled.len());
        self.compiled.push(pipeline);
        self.ids.insert(key, id);
        Ok(id)
    }

    fn compile(&self, kernel: &Kernel, key: &str) -> Result<wgpu::ComputePipeline> {
        let device = &self.gpu.device;
        let source = kernel.source(self.gpu.header(kernel.f16, kernel.subgroups))?;
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(key),
            source: wgpu::ShaderSource::Wgsl(source.into()),
        });
        let (_, layout) = self.layouts(&kernel.bindings);
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(key),
            layout: Some(&layout),
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
        self.gpu.pipeline_cache().compiled.insert(key.to_owned(), pipeline.clone());
        Ok(pipeline)
    }

    /// The pipeline of an id that [`Pipelines::id`] gave out.
    pub(super) fn get(&self, id: PipelineId) -> Option<&wgpu::ComputePipeline> {
        self.compiled.get(id.0)
    }
}
