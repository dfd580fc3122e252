#![no_main]

#[global_allocator]
static COUNTING: forecall::targets::Counting = forecall::targets::Counting;

libfuzzer_sys::fuzz_target!(|input: &[u8]| forecall::targets::run_named("store_resume", input));
