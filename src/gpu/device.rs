//! The GPU: which adapter, what it can do, and what went wrong with it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::footprint::Limits;
use super::matmul::DeviceClass;
use super::pipelines::PipelineCache;
use super::shader::Header;
use crate::error::{Error, Result};

/// What the caller knows of the device that wgpu does not.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceOptions {
    /// In a browser: the page's `requestDevice` asks for the `subgroups` feature where the adapter has it (wgpu does not),
    /// and it has it. Ignored natively, where wgpu says so itself.
    pub web_subgroups: bool,
    /// In a browser: the adapter's subgroup sizes, least and most (0 where unknown), which wgpu does not pass on.
    pub web_subgroup_sizes: (u32, u32),
    /// In a browser: the adapter says of itself that it is a fallback, a software one, which wgpu does not pass on either.
    pub web_software: bool,
    /// Keep to what every adapter has: no f16 type, no subgroups. For tests and for comparing.
    pub plain: bool,
    /// Ask for the limits that every WebGPU device has, and none beyond. For tests.
    pub default_limits: bool,
}

/// What a device is and can do.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuInfo {
    /// The adapter's name; browsers may leave it empty.
    pub name: String,
    /// `vulkan`, `metal`, `dx12` or `webgpu`.
    pub backend: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `unknown`.
    pub device_type: &'static str,
    /// Driver and version, where known.
    pub driver: String,
    /// Whether kernels may use the f16 type (`shader-f16`).
    pub shader_f16: bool,
    /// Whether kernels may use subgroup operations.
    pub subgroups: bool,
    /// Subgroup sizes, least and most (0 where unknown).
    pub subgroup_sizes: (u32, u32),
    /// Most bytes of one buffer.
    pub max_buffer_size: u64,
    /// Most bytes that a kernel can bind at once.
    pub max_storage_buffer_binding_size: u64,
    /// Storage buffers a kernel can bind.
    pub max_storage_buffers_per_shader_stage: u32,
    /// Bytes of workgroup memory.
    pub max_compute_workgroup_storage_size: u32,
    /// Threads of a workgroup.
    pub max_compute_invocations_per_workgroup: u32,
}

impl GpuInfo {
    /// The limits that a model can run into.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let Self { max_buffer_size, max_storage_buffer_binding_size, .. } = *self;
        Limits { max_buffer_size, max_storage_buffer_binding_size }
    }
}

/// An open device. Cheap to clone; all clones share the first failure.
#[derive(Debug, Clone)]
pub struct Gpu {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    info: Arc<GpuInfo>,
    fault: Arc<Mutex<Option<Error>>>,
    pipelines: Arc<Mutex<PipelineCache>>,
}

impl Gpu {
    /// Opens the fastest adapter with all the limits it has.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is no adapter or it refuses a device.
    pub async fn open(options: DeviceOptions) -> Result<Self> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
        let adapter = instance
            .request_adapter(&wgpu::RequestAdapterOptions {
                power_preference: wgpu::PowerPreference::HighPerformance,
                ..Default::default()
            })
            .await
            .map_err(|e| Error::Unsupported(format!("no WebGPU adapter: {e}")))?;
        let offered = adapter.features();
        let mut wanted = wgpu::Features::empty();
        if !options.plain {
            wanted |= offered & (wgpu::Features::SHADER_F16 | wgpu::Features::SUBGROUP);
        }
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("forecall"),
                required_features: wanted,
                required_limits: if options.default_limits { wgpu::Limits::default() } else { adapter.limits() },
                ..Default::default()
            })
            .await
            .map_err(|e| Error::Unsupported(format!("the WebGPU adapter gives no device: {e}")))?;

        let fault = Arc::new(Mutex::new(None));
        let at_error = Arc::clone(&fault);
        device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| {
            let error = match e {
                wgpu::Error::OutOfMemory { .. } => {
                    Error::OutOfMemory("the GPU has no memory left for the model; use a smaller context or model".into())
                }
                other => Error::Internal(format!("WebGPU refused an operation: {other}")),
            };
            keep_first(&at_error, error);
        }));
        let at_loss = Arc::clone(&fault);
        device.set_device_lost_callback(move |reason, message| {
            if reason != wgpu::DeviceLostReason::Destroyed {
                keep_first(&at_loss, Error::DeviceLost(format!("the GPU device was lost ({message}); load the model again")));
            }
        });

        let (about, limits) = (adapter.get_info(), device.limits());
        let subgroups = !options.plain
            && if cfg!(target_arch = "wasm32") { options.web_subgroups } else { wanted.contains(wgpu::Features::SUBGROUP) };
        let web = cfg!(target_arch = "wasm32");
        let info = GpuInfo {
            name: about.name,
            backend: match about.backend {
                wgpu::Backend::BrowserWebGpu => "webgpu".to_owned(),
                other => other.to_string(),
            },
            device_type: match about.device_type {
                _ if web && options.web_software => "software",
                wgpu::DeviceType::DiscreteGpu => "discrete",
                wgpu::DeviceType::IntegratedGpu => "integrated",
                wgpu::DeviceType::VirtualGpu => "virtual",
                wgpu::DeviceType::Cpu => "software",
                wgpu::DeviceType::Other => "unknown",
            },
            driver: format!("{} {}", about.driver, about.driver_info).trim().to_owned(),
            shader_f16: wanted.contains(wgpu::Features::SHADER_F16),
            subgroups,
            subgroup_sizes: if web { options.web_subgroup_sizes } else { (about.subgroup_min_size, about.subgroup_max_size) },
            max_buffer_size: limits.max_buffer_size,
            max_storage_buffer_binding_size: limits.max_storage_buffer_binding_size,
            max_storage_buffers_per_shader_stage: limits.max_storage_buffers_per_shader_stage,
            max_compute_workgroup_storage_size: limits.max_compute_workgroup_storage_size,
            max_compute_invocations_per_workgroup: limits.max_compute_invocations_per_workgroup,
        };
        Ok(Self { device, queue, info: Arc::new(info), fault, pipelines: Arc::default() })
    }

    /// What the device is and can do.
    #[must_use]
    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// The same device, taken to bind and hold at most this many bytes a buffer: how tests see a matrix split.
    #[must_use]
    pub fn with_smaller_buffers(&self, bytes: u64) -> Self {
        let mut info = GpuInfo::clone(&self.info);
        info.max_buffer_size = info.max_buffer_size.min(bytes);
        info.max_storage_buffer_binding_size = info.max_storage_buffer_binding_size.min(bytes);
        Self { info: Arc::new(info), ..self.clone() }
    }

    /// The same device, taken for a real GPU: how tests run on a software adapter what GPUs run.
    #[must_use]
    pub fn taken_for_hardware(&self) -> Self {
        Self { info: Arc::new(GpuInfo { device_type: "discrete", ..GpuInfo::clone(&self.info) }), ..self.clone() }
    }

    /// The first failure of the device, if there was one.
    ///
    /// # Errors
    /// [`Error::DeviceLost`], [`Error::OutOfMemory`], or [`Error::Internal`] with WebGPU's own words.
    pub fn check(&self) -> Result<()> {
        match &*self.fault.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Which kind of device matrix products are shaped for.
    #[must_use]
    pub fn class(&self) -> DeviceClass {
        match (self.info.device_type, self.info.subgroup_sizes) {
            ("software", (least, most)) => {
                DeviceClass::Cpu { subgroup: (self.info.subgroups && least == most && matches!(least, 4 | 8)).then_some(least) }
            }
            _ => DeviceClass::Gpu,
        }
    }

    pub(super) fn pipeline_cache(&self) -> MutexGuard<'_, PipelineCache> {
        self.pipelines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The `enable` lines of a module for this device's shader compiler.
    pub(super) fn header(&self, f16: bool, subgroups: bool) -> Header {
        Header { f16, subgroups: subgroups && cfg!(target_arch = "wasm32") }
    }
}

fn keep_first(fault: &Mutex<Option<Error>>, error: Error) {
    fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
}
