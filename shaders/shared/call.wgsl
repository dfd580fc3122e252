// A call's words (src/model/call_rows.rs): a header, then ROW_WORDS per row.
const HEADER_WORDS: u32 = 16u;
const ROW_WORDS: u32 = 8u;
const ROW_TOKEN: u32 = 0u;
const ROW_POSITION: u32 = 1u;
const ROW_SLOT: u32 = 2u;
const ROW_CACHE: u32 = 3u; // start, end
const ROW_SCRATCH: u32 = 5u; // start, end
const ROW_QUERY_SCALE: u32 = 7u; // f32 bits
const MASK_EMBEDDING: u32 = 0xffffffffu;
// An offset into the vectors buffer that stands for no vector.
const NONE: u32 = 0xffffffffu;
