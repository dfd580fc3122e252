//! Waiting for bytes to come back: polls the device natively, is woken by the browser on the web.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use super::device::Gpu;
use crate::error::{Error, Result};

#[derive(Debug, Default)]
struct State {
    done: Option<Result<(), wgpu::BufferAsyncError>>,
    waker: Option<Waker>,
}

/// A buffer on its way to being readable.
#[derive(Debug)]
pub(super) struct Mapping {
    gpu: Gpu,
    submission: wgpu::SubmissionIndex,
    state: Arc<Mutex<State>>,
}

impl Mapping {
    /// Asks for the first `bytes` of `buffer` once `submission` is through.
    pub(super) fn new(gpu: &Gpu, submission: wgpu::SubmissionIndex, buffer: &wgpu::Buffer, bytes: u64) -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let told = Arc::clone(&state);
        buffer.map_async(wgpu::MapMode::Read, 0..bytes, move |result| {
            let waker = {
                let mut state = told.lock().unwrap_or_else(PoisonError::into_inner);
                state.done = Some(result);
                state.waker.take()
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        });
        Self { gpu: gpu.clone(), submission, state }
    }

    /// Waits until the buffer is mapped. May be dropped and called again.
    pub(super) async fn ready(&mut self) -> Result<()> {
        Wait(self).await
    }
}

struct Wait<'a>(&'a mut Mapping);

impl Future for Wait<'_> {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mapping = &self.0;
        let done = || mapping.state.lock().unwrap_or_else(PoisonError::into_inner).done.clone();
        if !cfg!(target_arch = "wasm32") && done().is_none() {
            // Blocks until the call is through, so that the callback has run when this returns.
            let wait = wgpu::PollType::Wait { submission_index: Some(mapping.submission.clone()), timeout: None };
            if let Err(e) = mapping.gpu.device.poll(wait) {
                return Poll::Ready(Err(failure(&mapping.gpu, &format!("waiting for the GPU failed: {e}"))));
            }
        }
        let mut state = mapping.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &state.done {
            Some(Ok(())) => Poll::Ready(mapping.gpu.check()),
            Some(Err(e)) => Poll::Ready(Err(failure(&mapping.gpu, &format!("the GPU's answer cannot be read: {e}")))),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// The device's own failure if it has one, else that it was lost.
fn failure(gpu: &Gpu, what: &str) -> Error {
    gpu.check().err().unwrap_or_else(|| Error::DeviceLost(format!("{what}; load the model again")))
}

/// Copies a mapped buffer's first `bytes` out as words and unmaps it.
///
/// # Errors
/// [`Error::Internal`] if it is not mapped.
pub(super) fn take(buffer: &wgpu::Buffer, bytes: u64) -> Result<Vec<u32>> {
    let words = {
        let view =
            buffer.slice(0..bytes).get_mapped_range().map_err(|e| Error::Internal(format!("a mapped buffer is not: {e}")))?;
        bytemuck::pod_collect_to_vec::<u8, u32>(&view)
    };
    buffer.unmap();
    Ok(words)
}

/// Reads `bytes` of a buffer back, for tests and tools; allocates.
///
/// # Errors
/// Failures of the device.
pub(super) async fn read(gpu: &Gpu, buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> Result<Vec<u32>> {
    gpu.check()?;
    let staging = gpu.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("readback"),
        size: bytes,
        usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
        mapped_at_creation: false,
    });
    let mut encoder = gpu.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.copy_buffer_to_buffer(buffer, offset, &staging, 0, bytes);
    let submission = gpu.queue.submit([encoder.finish()]);
    Mapping::new(gpu, submission, &staging, bytes).ready().await?;
    take(&staging, bytes)
}
