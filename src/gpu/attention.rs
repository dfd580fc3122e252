//! Attention: which compiled kernel a call uses, its grid, and what it reads. The kernels are `shaders/attention.wgsl` and
//! `shaders/attention_merge.wgsl`; whatever is chosen here, a row's result has the same bits.

use super::footprint::Limits;
use super::matmul::DeviceClass;
use super::variants::{self, Kernel, KvStorage};
use crate::decode::plan::Row;
use crate::kernels::Heads;

/// Keys of a tile (`KEYS` in the shader).
const KEYS: u32 = 256;
/// Rows of a call that may be split along the cache (`PART_ROWS` in the shader).
const PART_ROWS: u32 = 16;
/// Tiles of the cache from which a call is split. A workgroup takes some 10 us for a tile on a GPU, mostly waiting, and
/// a further dispatch costs a page as much.
const SPLIT_TILES: u32 = 4;

/// How attention runs on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Attention {
    kv: KvStorage,
    class: DeviceClass,
    /// Query heads of a workgroup.
    heads: u32,
    /// Key heads times the workgroups that each of them is read by.
    columns: u32,
    /// ceil(Dh / 4).
    units: u32,
    /// Hq.
    query_heads: u32,
    /// Whether calls may be split along the cache.
    splits: bool,
}

impl Attention {
    /// For these heads on that device; `part_bytes` as [`part_bytes`] has them.
    #[must_use]
    pub fn new(class: DeviceClass, kv: KvStorage, heads: Heads, part_bytes: u64) -> Self {
        let shared_by = (heads.query / heads.key_value.max(1)).max(1) as u32;
        let units = (heads.dim as u32).div_ceil(4);
        let chunks = shared_by.div_ceil(most_queries(class, units));
        Self {
            kv,
            class,
            heads: shared_by.div_ceil(chunks),
            columns: heads.key_value as u32 * chunks,
            units,
            query_heads: heads.query as u32,
            splits: class == DeviceClass::Gpu && part_bytes > 0,
        }
    }

    /// Query heads of a workgroup.
    #[must_use]
    pub fn heads(&self) -> u32 {
        self.heads
    }

    /// Rows of a workgroup in a call of `rows` rows: one alone, else as many as fit, so that two kernels serve all calls.
    #[must_use]
    pub fn rows(&self, rows: u32) -> u32 {
        if rows <= 1 { 1 } else { (most_queries(self.class, self.units) / self.heads).clamp(1, 8) }
    }

    /// The kernel for workgroups of `rows` rows.
    #[must_use]
    pub fn kernel(&self, rows: u32) -> Kernel {
        let share = match self.class {
            DeviceClass::Cpu { subgroup } => subgroup.filter(|lanes| self.units.is_multiple_of(*lanes)),
            DeviceClass::Gpu => None,
        };
        variants::attention(self.kv, share, rows, self.heads, self.units)
    }

    /// Its grid; `parts` as [`Attention::parts`] has them.
    #[must_use]
    pub fn grid(&self, rows: u32, parts: u32) -> [u32; 3] {
        [self.columns, rows.div_ceil(self.rows(rows)), parts]
    }

    /// The grid that merges parts.
    #[must_use]
    pub fn merge_grid(&self, rows: u32) -> [u32; 3] {
        [(self.query_heads * self.units).div_ceil(64), rows, 1]
    }

    /// Whether there may be calls to merge.
    #[must_use]
    pub fn splits(&self) -> bool {
        self.splits
    }

    /// Into how many parts a call is cut whose rows see the cache up to slot `end`; 1 for no cut. A software adapter has
    /// workgroups enough for its few cores anyway.
    #[must_use]
    pub fn parts(&self, rows: u32, end: u32) -> u32 {
        let tiles = end.div_ceil(KEYS);
        if self.splits && rows <= PART_ROWS && tiles >= SPLIT_TILES { 1 + tiles } else { 1 }
    }

    /// Slots of which a call's keys and values are read in a layer, each once for every workgroup that reads it.
    #[must_use]
    pub fn slots_read(&self, rows: &[Row], window: Option<u32>) -> u64 {
        let mut slots = 0u64;
        for tile in rows.chunks(self.rows(rows.len() as u32) as usize) {
            let cache = |row: &Row| {
                let first = window.map_or(0, |w| (row.position + 1).saturating_sub(w));
                (row.sees.cache.start.max(first), row.sees.cache.end)
            };
            let seen = || tile.iter().map(cache).filter(|(start, end)| start < end);
            let (start, end) = (seen().map(|r| r.0).min().unwrap_or(0), seen().map(|r| r.1).max().unwrap_or(0));
            slots += u64::from(end - start);
            for (i, row) in tile.iter().enumerate() {
                let base = row.sees.scratch.start;
                if tile.iter().take(i).all(|before| before.sees.scratch.start != base) {
                    let with = tile.iter().map(|r| &r.sees.scratch).filter(|s| s.start == base && !s.is_empty());
                    slots += u64::from(with.map(|s| s.end - base).max().unwrap_or(0));
                }
            }
        }
        slots * u64::from(self.columns)
    }
}

/// Bytes of the buffer that holds parts, for a cache of `context` slots; none if no call is ever cut or the limits do not
/// allow it.
#[must_use]
pub fn part_bytes(heads: Heads, context: u32, limits: Limits) -> u64 {
    let tiles = u64::from(context.div_ceil(KEYS));
    let bytes = (1 + tiles) * u64::from(PART_ROWS) * (heads.query * (heads.dim.div_ceil(4) + 1) * 16) as u64;
    let most = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
    if tiles < u64::from(SPLIT_TILES) || bytes > most { 0 } else { bytes }
}

/// Most queries of a workgroup: 16 KB of workgroup memory is what every device has, and a thread holds some eight
/// registers for each. SwiftShader's compiler (subgroups of 4) takes seconds for more.
fn most_queries(class: DeviceClass, units: u32) -> u32 {
    let most = if class == (DeviceClass::Cpu { subgroup: Some(4) }) { 8 } else { 12 };
    (16384 / (16 * units + 1056)).clamp(1, most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::plan::{Keep, RowToken, Sees};

    fn row(position: u32, cache: u32, scratch: std::ops::Range<u32>) -> Row {
        let sees = Sees { cache: 0..cache, scratch };
        Row { token: RowToken::Id(0), position, adapter: false, keep: Keep::Cache(position), sees, choose: false }
    }

    #[test]
    fn tiles_fit_what_every_device_has() {
        let gpu = DeviceClass::Gpu;
        for dim in 1..=256 {
            for (query, key_value) in [(1, 1), (9, 3), (32, 8), (14, 2), (24, 1), (40, 1)] {
                for class in [gpu, DeviceClass::Cpu { subgroup: Some(4) }, DeviceClass::Cpu { subgroup: Some(8) }] {
                    let a = Attention::new(class, KvStorage::F16, Heads { query, key_value, dim }, 1);
                    let queries = a.heads * a.rows(100);
                    assert!(queries >= 1 && queries * (16 * a.units + 1056) <= 16384, "{a:?}");
                    assert!(a.columns * a.heads >= query as u32 && a.columns.is_multiple_of(key_value as u32), "{a:?}");
                    assert_eq!((a.rows(1), a.grid(1, 1)), (1, [a.columns, 1, 1]));
                }
            }
        }
        let tile = |query, key_value, dim| {
            let a = Attention::new(gpu, KvStorage::F16, Heads { query, key_value, dim }, 1);
            (a.rows(13), a.heads, a.grid(13, 1))
        };
        assert_eq!(tile(9, 3, 64), (4, 3, [3, 4, 1]));
        assert_eq!(tile(32, 8, 128), (2, 4, [8, 7, 1]));
        assert_eq!(tile(16, 16, 64), (8, 1, [16, 2, 1]));
    }

    #[test]
    fn calls_are_split_where_it_pays() {
        let heads = Heads { query: 9, key_value: 3, dim: 64 };
        let bytes = part_bytes(heads, 2048, Limits::default());
        assert_eq!(bytes, 9 * 16 * 9 * 17 * 16);
        let parts = |class, rows, end| Attention::new(class, KvStorage::F16, heads, bytes).parts(rows, end);
        assert_eq!([768, 769, 2048].map(|end| parts(DeviceClass::Gpu, 16, end)), [1, 5, 9]);
        assert_eq!(parts(DeviceClass::Gpu, 17, 2048), 1);
        assert_eq!(parts(DeviceClass::Cpu { subgroup: None }, 1, 2048), 1);
        assert_eq!(part_bytes(heads, 768, Limits::default()), 0);
        assert_eq!(part_bytes(heads, 2048, Limits { max_buffer_size: 100_000, ..Limits::default() }), 0);
        assert_eq!(Attention::new(DeviceClass::Gpu, KvStorage::F16, heads, 0).parts(1, 2048), 1);
    }

    #[test]
    fn slots_read_by_hand() {
        let a = Attention::new(DeviceClass::Gpu, KvStorage::F16, Heads { query: 9, key_value: 3, dim: 64 }, 1);
        let one = |position| row(position, position + 1, 0..0);
        assert_eq!(a.slots_read(&[one(99)], None), 3 * 100);
        assert_eq!(a.slots_read(&[one(99)], Some(30)), 3 * 30);
        // Four rows share: 103 slots, not 100 + 101 + 102 + 103.
        let rows: Vec<_> = (99..103).map(one).collect();
        assert_eq!(a.slots_read(&rows, None), 3 * 103);
        assert_eq!(a.slots_read(&rows, Some(30)), 3 * 33);
        // The fifth reads for itself; three of its tile are a block, two ranges of the scratch slots.
        let block = [row(103, 99, 0..8), row(104, 99, 0..8), row(104, 99, 8..10)];
        let rows: Vec<_> = rows.into_iter().chain([one(103)]).chain(block).collect();
        assert_eq!(a.slots_read(&rows, None), 3 * (103 + 104 + 8 + 2));
    }
}
