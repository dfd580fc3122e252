//! Sixteen lanes of 32 bits, on whatever the processor has: the vocabulary the fast kernels are written in.
//!
//! One generic kernel body serves every level; [`simd_fn!`] compiles it once per level and picks at run time. All
//! levels give the same bits: integer dot products are exact, and f32 products and sums are rounded one by one in one
//! order (never fused). So the portable level is a judge of the others.

/// Sixteen 32-bit lanes in memory, a cache line.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C, align(64))]
pub struct Line<T>(pub [T; LANES]);

/// Sixteen f16 in memory, half a cache line.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C, align(32))]
pub struct HalfLine(pub [u16; LANES]);

/// Lanes of a tile.
pub const LANES: usize = 16;

/// Operations on sixteen lanes. Values of this type are proof that the processor has them.
pub trait Simd: Copy {
    /// Lanes of u32 or i32, or twice as many of i16.
    type I: Copy;
    /// Lanes of f32.
    type F: Copy;
    /// In how many parts the sixteen lanes are worked on, so that a kernel's values fit the registers there are. `load`,
    /// `store` and their kin take the part; everything else works on one.
    const PARTS: usize;
    /// Rows of a call that a product keeps in registers at once.
    const ROWS: usize;
    /// Queries whose scores and sums attention keeps in registers at once; 1 to 4, 8 or 12.
    const QUERIES: usize;
    /// Most rows of a product that read packed weights directly; more rows unpack a group into a buffer first.
    const DIRECT: usize;

    fn load(self, from: &[u32; LANES], part: usize) -> Self::I;
    fn store(self, value: Self::I, to: &mut [u32; LANES], part: usize);
    fn splat(self, value: i32) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn add(self, a: Self::I, b: Self::I) -> Self::I;
    /// Logical shift right.
    fn shr<const N: i32>(self, a: Self::I) -> Self::I;
    /// Arithmetic shift right.
    fn sar<const N: i32>(self, a: Self::I) -> Self::I;
    fn shl<const N: i32>(self, a: Self::I) -> Self::I;
    /// `acc + a.low * b.low + a.high * b.high` on the i16 halves of every lane.
    fn dot(self, acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// [`Simd::dot`] with `b` in every lane.
    #[inline(always)]
    fn dot_splat(self, acc: Self::I, a: Self::I, b: &i32) -> Self::I {
        self.dot(acc, a, self.splat(*b))
    }
    fn to_f(self, a: Self::I) -> Self::F;
    fn bits_to_f(self, a: Self::I) -> Self::F;

    fn load_f(self, from: &[f32; LANES], part: usize) -> Self::F;
    fn store_f(self, value: Self::F, to: &mut [f32; LANES], part: usize);
    fn splat_f(self, value: f32) -> Self::F;
    fn add_f(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul_f(self, a: Self::F, b: Self::F) -> Self::F;
    /// Finite f16.
    fn load_half(self, from: &[u16; LANES], part: usize) -> Self::F;

    /// Asks for the cache line at an address, which may lie anywhere, ahead of its use.
    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}
}

/// 2^112: what an f16's exponent, moved into an f32, is short of.
const HALF_BIAS: f32 = f32::from_bits(0x7780_0000);
/// Sign, and the five exponent and ten mantissa bits of an f16 that was sign-extended and moved up by 13.
const HALF_MASK: i32 = 0x8FFF_E000_u32 as i32;

/// The finite f16 in the low half of every lane.
#[inline(always)]
pub fn low_half<S: Simd>(s: S, pairs: S::I) -> S::F {
    let bits = s.and(s.sar::<3>(s.shl::<16>(pairs)), s.splat(HALF_MASK));
    s.mul_f(s.bits_to_f(bits), s.splat_f(HALF_BIAS))
}

/// The finite f16 in the high half of every lane.
#[inline(always)]
pub fn high_half<S: Simd>(s: S, pairs: S::I) -> S::F {
    let bits = s.and(s.sar::<3>(pairs), s.splat(HALF_MASK));
    s.mul_f(s.bits_to_f(bits), s.splat_f(HALF_BIAS))
}

/// Plain Rust. A page with SIMD128 carries no second copy of the kernels.
#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
#[derive(Debug, Clone, Copy)]
pub struct Portable;

#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
#[inline(always)]
fn each<A: Copy, B>(a: [A; LANES], f: impl Fn(A) -> B) -> [B; LANES] {
    a.map(f)
}

#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
#[inline(always)]
fn both<A: Copy, B: Copy + Default>(a: [A; LANES], b: [A; LANES], f: impl Fn(A, A) -> B) -> [B; LANES] {
    let mut out = [B::default(); LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
impl Simd for Portable {
    type I = [u32; LANES];
    type F = [f32; LANES];
    const PARTS: usize = 1;
    const ROWS: usize = 2;
    const QUERIES: usize = 4;
    const DIRECT: usize = 2;

    #[inline(always)]
    fn load(self, from: &[u32; LANES], _: usize) -> Self::I {
        *from
    }
    #[inline(always)]
    fn store(self, value: Self::I, to: &mut [u32; LANES], _: usize) {
        *to = value;
    }
    #[inline(always)]
    fn splat(self, value: i32) -> Self::I {
        [value as u32; LANES]
    }
    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn add(self, a: Self::I, b: Self::I) -> Self::I {
        both(a, b, u32::wrapping_add)
    }
    #[inline(always)]
    fn shr<const N: i32>(self, a: Self::I) -> Self::I {
        each(a, |a| a >> N)
    }
    #[inline(always)]
    fn sar<const N: i32>(self, a: Self::I) -> Self::I {
        each(a, |a| (a as i32 >> N) as u32)
    }
    #[inline(always)]
    fn shl<const N: i32>(self, a: Self::I) -> Self::I {
        each(a, |a| a << N)
    }
    #[inline(always)]
    fn dot(self, acc: Self::I, a: Self::I, b: Self::I) -> Self::I {
        let half = |v: u32, shift: u32| i32::from((v >> shift) as u16 as i16);
        let products = both(a, b, |a, b| (half(a, 0) * half(b, 0)).wrapping_add(half(a, 16) * half(b, 16)) as u32);
        both(acc, products, u32::wrapping_add)
    }
    #[inline(always)]
    fn to_f(self, a: Self::I) -> Self::F {
        each(a, |a| a as i32 as f32)
    }
    #[inline(always)]
    fn bits_to_f(self, a: Self::I) -> Self::F {
        each(a, f32::from_bits)
    }
    #[inline(always)]
    fn load_f(self, from: &[f32; LANES], _: usize) -> Self::F {
        *from
    }
    #[inline(always)]
    fn store_f(self, value: Self::F, to: &mut [f32; LANES], _: usize) {
        *to = value;
    }
    #[inline(always)]
    fn splat_f(self, value: f32) -> Self::F {
        [value; LANES]
    }
    #[inline(always)]
    fn add_f(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn mul_f(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn load_half(self, from: &[u16; LANES], _: usize) -> Self::F {
        each(*from, |h| f32::from_bits(((i32::from(h as i16) << 13) & HALF_MASK) as u32) * HALF_BIAS)
    }
}

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm {
    #![allow(clippy::redundant_closure, reason = "functions with target features are not closures by themselves")]

    use core::arch::wasm32::*;

    use super::{HALF_BIAS, HALF_MASK, LANES, Simd};

    /// WebAssembly's SIMD128: two vectors at a time, two times.
    #[derive(Debug, Clone, Copy)]
    pub struct Wasm;

    type V = [v128; 2];

    #[inline(always)]
    fn both(a: V, b: V, f: impl Fn(v128, v128) -> v128) -> V {
        [f(a[0], b[0]), f(a[1], b[1])]
    }

    /// Reads 32 bytes, the first or second half.
    #[inline(always)]
    fn load<T>(from: &[T; LANES], part: usize) -> V {
        const { assert!(size_of::<T>() == 4) };
        let at = from[part * LANES / 2..][..LANES / 2].as_ptr().cast::<v128>();
        // SAFETY: the slice is 32 bytes long; v128.load allows any alignment.
        unsafe { [v128_load(at), v128_load(at.add(1))] }
    }

    #[inline(always)]
    fn store<T>(value: V, to: &mut [T; LANES], part: usize) {
        const { assert!(size_of::<T>() == 4) };
        let at = to[part * LANES / 2..][..LANES / 2].as_mut_ptr().cast::<v128>();
        // SAFETY: the slice is 32 bytes long; v128.store allows any alignment.
        unsafe {
            v128_store(at, value[0]);
            v128_store(at.add(1), value[1]);
        }
    }

    impl Simd for Wasm {
        type I = V;
        type F = V;
        const PARTS: usize = 2;
        const ROWS: usize = 4;
        const QUERIES: usize = 4;
        const DIRECT: usize = 2;

        #[inline(always)]
        fn load(self, from: &[u32; LANES], part: usize) -> V {
            load(from, part)
        }
        #[inline(always)]
        fn store(self, value: V, to: &mut [u32; LANES], part: usize) {
            store(value, to, part);
        }
        #[inline(always)]
        fn splat(self, value: i32) -> V {
            [i32x4_splat(value); 2]
        }
        #[inline(always)]
        fn and(self, a: V, b: V) -> V {
            both(a, b, |a, b| v128_and(a, b))
        }
        #[inline(always)]
        fn add(self, a: V, b: V) -> V {
            both(a, b, |a, b| i32x4_add(a, b))
        }
        #[inline(always)]
        fn shr<const N: i32>(self, a: V) -> V {
            a.map(|a| u32x4_shr(a, N as u32))
        }
        #[inline(always)]
        fn sar<const N: i32>(self, a: V) -> V {
            a.map(|a| i32x4_shr(a, N as u32))
        }
        #[inline(always)]
        fn shl<const N: i32>(self, a: V) -> V {
            a.map(|a| i32x4_shl(a, N as u32))
        }
        #[inline(always)]
        fn dot(self, acc: V, a: V, b: V) -> V {
            both(acc, both(a, b, |a, b| i32x4_dot_i16x8(a, b)), |a, b| i32x4_add(a, b))
        }
        #[inline(always)]
        fn to_f(self, a: V) -> V {
            a.map(|a| f32x4_convert_i32x4(a))
        }
        #[inline(always)]
        fn bits_to_f(self, a: V) -> V {
            a
        }
        #[inline(always)]
        fn load_f(self, from: &[f32; LANES], part: usize) -> V {
            load(from, part)
        }
        #[inline(always)]
        fn store_f(self, value: V, to: &mut [f32; LANES], part: usize) {
            store(value, to, part);
        }
        #[inline(always)]
        fn splat_f(self, value: f32) -> V {
            [f32x4_splat(value); 2]
        }
        #[inline(always)]
        fn add_f(self, a: V, b: V) -> V {
            both(a, b, |a, b| f32x4_add(a, b))
        }
        #[inline(always)]
        fn mul_f(self, a: V, b: V) -> V {
            both(a, b, |a, b| f32x4_mul(a, b))
        }
        #[inline(always)]
        fn load_half(self, from: &[u16; LANES], part: usize) -> V {
            let at = from[part * LANES / 2..][..LANES / 2].as_ptr().cast::<i16>();
            let four = |i: usize| {
                // SAFETY: the slice is 16 bytes long, of which 8 are read at 8 i; any alignment is allowed.
                let h = unsafe { i32x4_load_extend_i16x4(at.add(4 * i)) };
                let bits = v128_and(i32x4_shl(h, 13), i32x4_splat(HALF_MASK));
                f32x4_mul(bits, f32x4_splat(HALF_BIAS))
            };
            [four(0), four(1)]
        }
    }
}
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub use wasm::Wasm;

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    //! AVX2 with F16C (two vectors) and AVX-512 with VNNI (one).
    //!
    //! SAFETY of every block: values of [`Avx2`] and [`Avx512`] are made only after detection of the features their
    //! intrinsics need, and loads and stores go through references to arrays of the size they touch.

    use std::arch::x86_64::*;

    use super::{LANES, Simd};

    /// AVX2, FMA and F16C.
    #[derive(Debug, Clone, Copy)]
    pub struct Avx2(());

    impl Avx2 {
        pub fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Self(()))
        }
    }

    /// AVX-512 F, BW, DQ, VL and VNNI.
    #[derive(Debug, Clone, Copy)]
    pub struct Avx512(());

    impl Avx512 {
        pub fn detect() -> Option<Self> {
            let all = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
                && is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("f16c");
            all.then_some(Self(()))
        }
    }

    type I2 = [__m256i; 2];
    type F2 = [__m256; 2];

    impl Simd for Avx2 {
        type I = I2;
        type F = F2;
        const PARTS: usize = 1;
        const ROWS: usize = 4;
        const QUERIES: usize = 4;
        const DIRECT: usize = 2;

        #[inline(always)]
        fn load(self, from: &[u32; LANES], _: usize) -> I2 {
            let at = from.as_ptr().cast::<__m256i>();
            unsafe { [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))] }
        }
        #[inline(always)]
        fn store(self, value: I2, to: &mut [u32; LANES], _: usize) {
            let at = to.as_mut_ptr().cast::<__m256i>();
            unsafe {
                _mm256_storeu_si256(at, value[0]);
                _mm256_storeu_si256(at.add(1), value[1]);
            }
        }
        #[inline(always)]
        fn splat(self, value: i32) -> I2 {
            unsafe { [_mm256_set1_epi32(value); 2] }
        }
        #[inline(always)]
        fn and(self, a: I2, b: I2) -> I2 {
            unsafe { [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])] }
        }
        #[inline(always)]
        fn add(self, a: I2, b: I2) -> I2 {
            unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
        }
        #[inline(always)]
        fn shr<const N: i32>(self, a: I2) -> I2 {
            unsafe { [_mm256_srli_epi32::<N>(a[0]), _mm256_srli_epi32::<N>(a[1])] }
        }
        #[inline(always)]
        fn sar<const N: i32>(self, a: I2) -> I2 {
            unsafe { [_mm256_srai_epi32::<N>(a[0]), _mm256_srai_epi32::<N>(a[1])] }
        }
        #[inline(always)]
        fn shl<const N: i32>(self, a: I2) -> I2 {
            unsafe { [_mm256_slli_epi32::<N>(a[0]), _mm256_slli_epi32::<N>(a[1])] }
        }
        #[inline(always)]
        fn dot(self, acc: I2, a: I2, b: I2) -> I2 {
            unsafe {
                [_mm256_add_epi32(acc[0], _mm256_madd_epi16(a[0], b[0])), _mm256_add_epi32(acc[1], _mm256_madd_epi16(a[1], b[1]))]
            }
        }
        #[inline(always)]
        fn to_f(self, a: I2) -> F2 {
            unsafe { [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])] }
        }
        #[inline(always)]
        fn bits_to_f(self, a: I2) -> F2 {
            unsafe { [_mm256_castsi256_ps(a[0]), _mm256_castsi256_ps(a[1])] }
        }
        #[inline(always)]
        fn load_f(self, from: &[f32; LANES], _: usize) -> F2 {
            unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))] }
        }
        #[inline(always)]
        fn store_f(self, value: F2, to: &mut [f32; LANES], _: usize) {
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), value[0]);
                _mm256_storeu_ps(to.as_mut_ptr().add(8), value[1]);
            }
        }
        #[inline(always)]
        fn splat_f(self, value: f32) -> F2 {
            unsafe { [_mm256_set1_ps(value); 2] }
        }
        #[inline(always)]
        fn add_f(self, a: F2, b: F2) -> F2 {
            unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn mul_f(self, a: F2, b: F2) -> F2 {
            unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn load_half(self, from: &[u16; LANES], _: usize) -> F2 {
            let at = from.as_ptr().cast::<__m128i>();
            unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at.add(1)))] }
        }
        #[inline(always)]
        fn prefetch<T>(self, at: *const T) {
            // A prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
    }

    /// `vpdpwssd` with its input broadcast from memory. The compiler takes the intrinsic apart into a broadcast, a
    /// multiplication and an addition, to shorten a chain of sums that is not what the kernel waits for.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn dot_splat(mut acc: __m512i, a: __m512i, b: &i32) -> __m512i {
        unsafe {
            std::arch::asm!(
                "vpdpwssd {acc}, {a}, dword ptr [{b}]{{1to16}}",
                acc = inout(zmm_reg) acc,
                a = in(zmm_reg) a,
                b = in(reg) b,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        acc
    }

    impl Simd for Avx512 {
        type I = __m512i;
        type F = __m512;
        const PARTS: usize = 1;
        // One or two sums a row and the row's output.
        const ROWS: usize = 8;
        const QUERIES: usize = 12;
        const DIRECT: usize = usize::MAX;

        #[inline(always)]
        fn load(self, from: &[u32; LANES], _: usize) -> __m512i {
            unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
        }
        #[inline(always)]
        fn store(self, value: __m512i, to: &mut [u32; LANES], _: usize) {
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), value) }
        }
        #[inline(always)]
        fn splat(self, value: i32) -> __m512i {
            unsafe { _mm512_set1_epi32(value) }
        }
        #[inline(always)]
        fn and(self, a: __m512i, b: __m512i) -> __m512i {
            unsafe { _mm512_and_si512(a, b) }
        }
        #[inline(always)]
        fn add(self, a: __m512i, b: __m512i) -> __m512i {
            unsafe { _mm512_add_epi32(a, b) }
        }
        #[inline(always)]
        fn shr<const N: i32>(self, a: __m512i) -> __m512i {
            unsafe { _mm512_srl_epi32(a, _mm_cvtsi32_si128(N)) }
        }
        #[inline(always)]
        fn sar<const N: i32>(self, a: __m512i) -> __m512i {
            unsafe { _mm512_sra_epi32(a, _mm_cvtsi32_si128(N)) }
        }
        #[inline(always)]
        fn shl<const N: i32>(self, a: __m512i) -> __m512i {
            unsafe { _mm512_sll_epi32(a, _mm_cvtsi32_si128(N)) }
        }
        #[inline(always)]
        fn dot(self, acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
            unsafe { _mm512_dpwssd_epi32(acc, a, b) }
        }
        #[inline(always)]
        fn dot_splat(self, acc: __m512i, a: __m512i, b: &i32) -> __m512i {
            unsafe { dot_splat(acc, a, b) }
        }
        #[inline(always)]
        fn to_f(self, a: __m512i) -> __m512 {
            unsafe { _mm512_cvtepi32_ps(a) }
        }
        #[inline(always)]
        fn bits_to_f(self, a: __m512i) -> __m512 {
            unsafe { _mm512_castsi512_ps(a) }
        }
        #[inline(always)]
        fn load_f(self, from: &[f32; LANES], _: usize) -> __m512 {
            unsafe { _mm512_loadu_ps(from.as_ptr()) }
        }
        #[inline(always)]
        fn store_f(self, value: __m512, to: &mut [f32; LANES], _: usize) {
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
        }
        #[inline(always)]
        fn splat_f(self, value: f32) -> __m512 {
            unsafe { _mm512_set1_ps(value) }
        }
        #[inline(always)]
        fn add_f(self, a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        fn mul_f(self, a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn load_half(self, from: &[u16; LANES], _: usize) -> __m512 {
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
        }
        #[inline(always)]
        fn prefetch<T>(self, at: *const T) {
            // A prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
    }
}

/// Which instructions the kernels use.
#[derive(Debug, Clone, Copy)]
pub enum Level {
    /// Plain Rust.
    #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
    Portable(Portable),
    /// SIMD128.
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    Wasm(Wasm),
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl Level {
    /// The levels this processor has, slowest first. (A page with SIMD128 has but one.)
    #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
    #[must_use]
    pub fn all() -> Vec<Self> {
        let levels = [
            Some(Self::Portable(Portable)),
            #[cfg(target_arch = "x86_64")]
            x86::Avx2::detect().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            x86::Avx512::detect().map(Self::Avx512),
        ];
        levels.into_iter().flatten().collect()
    }

    /// The fastest level this processor has.
    #[must_use]
    pub fn best() -> Self {
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        return Self::Wasm(Wasm);
        #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
        Self::all().pop().unwrap_or(Self::Portable(Portable))
    }

    /// [`Simd::QUERIES`].
    #[must_use]
    pub fn queries(self) -> usize {
        fn of<S: Simd>(_: S) -> usize {
            S::QUERIES
        }
        match self {
            #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
            Self::Portable(s) => of(s),
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            Self::Wasm(s) => of(s),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(s) => of(s),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(s) => of(s),
        }
    }

    /// Its name, for a model's info.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
            Self::Portable(_) => "portable",
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            Self::Wasm(_) => "wasm simd128",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512 vnni",
        }
    }
}

/// Declares `$name(level, args)`, which runs the generic body `$body(simd, args)` compiled for that level.
macro_rules! simd_fn {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$doc])*
        $vis fn $name(level: $crate::cpu::simd::Level, $($arg: $ty),*) $(-> $ret)? {
            use $crate::cpu::simd::Level;
            match level {
                #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
                Level::Portable(s) => $body(s, $($arg),*),
                #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
                Level::Wasm(s) => $body(s, $($arg),*),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2(s) => {
                    #[target_feature(enable = "avx2,f16c")]
                    fn run(s: $crate::cpu::simd::x86::Avx2, $($arg: $ty),*) $(-> $ret)? {
                        $body(s, $($arg),*)
                    }
                    // SAFETY: an `Avx2` exists only where these features were detected.
                    unsafe { run(s, $($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                Level::Avx512(s) => {
                    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
                    fn run(s: $crate::cpu::simd::x86::Avx512, $($arg: $ty),*) $(-> $ret)? {
                        $body(s, $($arg),*)
                    }
                    // SAFETY: an `Avx512` exists only where these features were detected.
                    unsafe { run(s, $($arg),*) }
                }
            }
        }
    };
}
pub(super) use simd_fn;
