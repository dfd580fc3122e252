//! Decoding schedules as pure state machines: no device, clock or I/O.

pub mod plan;
pub mod schedule;
