//! Buffers of a loaded model: allocated once, checked against the device's limits, counted by kind.

use super::device::Gpu;
use crate::error::{Error, Result};

/// Bytes of GPU memory by use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// Matrices and vectors, the adapter's included.
    pub weights: u64,
    /// K/V of all layers.
    pub kv_cache: u64,
    /// Activations, logits, rotary table, call words, parameters, readback.
    pub working: u64,
}

/// What a buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Weights,
    KvCache,
    Working,
}

/// Allocates and counts.
#[derive(Debug)]
pub(super) struct Allocator {
    gpu: Gpu,
    pub(super) used: MemoryUse,
}

impl Allocator {
    pub(super) fn new(gpu: Gpu) -> Self {
        Self { gpu, used: MemoryUse::default() }
    }

    /// A zeroed storage buffer that is bound as a whole. `remedy` ends the message if it is too large.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the limit; a failure of the device.
    pub(super) fn storage(&mut self, kind: Kind, label: &str, bytes: u64, remedy: &str) -> Result<wgpu::Buffer> {
        let most = self.gpu.info().max_storage_buffer_binding_size;
        if bytes > most {
            return Err(Error::Unsupported(format!(
                "{label} takes {bytes} bytes, but this GPU binds at most {most} at once (maxStorageBufferBindingSize); {remedy}"
            )));
        }
        self.buffer(
            kind,
            label,
            bytes,
            wgpu::BufferUsages::STORAGE
                | wgpu::BufferUsages::UNIFORM
                | wgpu::BufferUsages::COPY_DST
                | wgpu::BufferUsages::COPY_SRC,
        )
    }

    /// A buffer of any usage.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the limit; a failure of the device.
    pub(super) fn buffer(&mut self, kind: Kind, label: &str, bytes: u64, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer> {
        let most = self.gpu.info().max_buffer_size;
        let size = bytes.next_multiple_of(16).max(256);
        if size > most {
            return Err(Error::Unsupported(format!(
                "{label} takes {size} bytes, but a buffer of this GPU holds at most {most} (maxBufferSize)"
            )));
        }
        let buffer =
            self.gpu.device.create_buffer(&wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false });
        self.gpu.check()?;
        match kind {
            Kind::Weights => self.used.weights += size,
            Kind::KvCache => self.used.kv_cache += size,
            Kind::Working => self.used.working += size,
        }
        Ok(buffer)
    }
}
