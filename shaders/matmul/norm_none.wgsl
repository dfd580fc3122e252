// Inputs are taken as they are.
const NORM: bool = false;

fn norms(li: u32, row0: u32, last_row: u32) {}
