//! The GPU backend against the f64 reference, on whatever adapter the machine has. A machine without one fails.

mod forward;
mod kernels;
mod model;

use std::sync::OnceLock;

use super::device::{DeviceOptions, Gpu};

/// The test device; opened once. `plain` is the one without f16 type and subgroups.
fn gpu(plain: bool) -> Gpu {
    static GPUS: [OnceLock<Gpu>; 2] = [OnceLock::new(), OnceLock::new()];
    GPUS[usize::from(plain)]
        .get_or_init(|| {
            let options = DeviceOptions { plain, ..DeviceOptions::default() };
            pollster::block_on(Gpu::open(options)).expect("tests need a WebGPU adapter (Mesa's lavapipe will do)")
        })
        .clone()
}
