/* Four-bit codes to fp32 in one pass; native.py says when it is used and what holds.

   Built with the package where there is a C compiler. Plain C11, nothing of Python's: native.py loads it by
   ctypes, so a call holds no interpreter lock. Each value is a product of two floats and a sum with zero, so
   every branch gives the same bits. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK_BYTES 64 /* of codes, two in each byte, the first in the low nibble */
#define BLOCK_VALUES 128

#define ROW_BYTES 68 /* the codes, then four bytes that begin with the scale */

struct blocks {
    const uint8_t *rows;
    ptrdiff_t count;
    int half;            /* whether scales are fp16, not fp32 */
    float unit;          /* what a scale is multiplied by */
    const float *levels; /* what the 16 codes stand for, in units of scales */
    float zero;          /* +0 turns negative zeros into positive ones, -0 changes nothing */
    float *values;
};

static float of_half(uint16_t half) {
    const uint32_t exponent = half >> 10 & 31, fraction = half & 1023, sign = (uint32_t)half >> 15 << 31;
    uint32_t bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    float value;
    if (exponent == 0) /* subnormal: a multiple of 2**-24 */
        return (sign ? -0x1p-24f : 0x1p-24f) * (float)fraction;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float scale_of(const struct blocks *it, const uint8_t *row) {
    uint16_t half;
    float scale;
    memcpy(&half, row + BLOCK_BYTES, sizeof half);
    memcpy(&scale, row + BLOCK_BYTES, sizeof scale);
    return (it->half ? of_half(half) : scale) * it->unit;
}

static void decode_anywhere(const struct blocks *it) {
    for (ptrdiff_t block = 0; block < it->count; block++) {
        const uint8_t *codes = it->rows + block * ROW_BYTES;
        float *values = it->values + block * BLOCK_VALUES;
        const float scale = scale_of(it, codes);
        for (int i = 0; i < BLOCK_BYTES; i++) {
            values[2 * i] = it->levels[codes[i] & 15] * scale + it->zero;
            values[2 * i + 1] = it->levels[codes[i] >> 4] * scale + it->zero;
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* From this many blocks on (16 MiB of values) the result does not stay in a cache anyway: it goes past the
   caches to memory, which spares reading each line before it is written. */
#define STREAMED_BLOCKS 32768

#define AVX512 __attribute__((target("avx512f,avx512bw")))
#define AVX2 __attribute__((target("avx2")))

AVX512 static inline __m512 sixteen(__m128i codes, __m512 levels, __m512 scale, __m512 zero) {
    const __m512 steps = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), levels);
    return _mm512_add_ps(_mm512_mul_ps(steps, scale), zero);
}

AVX512 static void decode_avx512(const struct blocks *it) {
    const __m512 levels = _mm512_loadu_ps(it->levels), zero = _mm512_set1_ps(it->zero);
    const __m128i nibble = _mm_set1_epi8(15);
    const int streamed = it->count >= STREAMED_BLOCKS && ((uintptr_t)it->values & 63) == 0;
    for (ptrdiff_t block = 0; block < it->count; block++) {
        const uint8_t *codes = it->rows + block * ROW_BYTES;
        float *values = it->values + block * BLOCK_VALUES;
        const __m512 scale = _mm512_set1_ps(scale_of(it, codes));
        for (int i = 0; i < BLOCK_BYTES; i += 16, values += 32) {
            const __m128i pairs = _mm_loadu_si128((const __m128i *)(codes + i));
            const __m128i firsts = _mm_and_si128(pairs, nibble);
            const __m128i seconds = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
            const __m512 low = sixteen(_mm_unpacklo_epi8(firsts, seconds), levels, scale, zero);
            const __m512 high = sixteen(_mm_unpackhi_epi8(firsts, seconds), levels, scale, zero);
            if (streamed) {
                _mm512_stream_ps(values, low);
                _mm512_stream_ps(values + 16, high);
            } else {
                _mm512_storeu_ps(values, low);
                _mm512_storeu_ps(values + 16, high);
            }
        }
    }
    if (streamed)
        _mm_sfence();
}

AVX2 static inline __m256 eight(__m128i codes, __m256 below, __m256 above, __m256 scale, __m256 zero) {
    const __m256i wide = _mm256_cvtepu8_epi32(codes);
    const __m256 upper_half = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 28)); /* bit 3 as the sign */
    const __m256 steps = _mm256_blendv_ps(
        _mm256_permutevar8x32_ps(below, wide), _mm256_permutevar8x32_ps(above, wide), upper_half);
    return _mm256_add_ps(_mm256_mul_ps(steps, scale), zero);
}

AVX2 static void decode_avx2(const struct blocks *it) {
    const __m256 below = _mm256_loadu_ps(it->levels), above = _mm256_loadu_ps(it->levels + 8);
    const __m256 zero = _mm256_set1_ps(it->zero);
    const __m128i nibble = _mm_set1_epi8(15);
    const int streamed = it->count >= STREAMED_BLOCKS && ((uintptr_t)it->values & 31) == 0;
    for (ptrdiff_t block = 0; block < it->count; block++) {
        const uint8_t *codes = it->rows + block * ROW_BYTES;
        float *values = it->values + block * BLOCK_VALUES;
        const __m256 scale = _mm256_set1_ps(scale_of(it, codes));
        for (int i = 0; i < BLOCK_BYTES; i += 8, values += 16) {
            const __m128i pairs = _mm_loadl_epi64((const __m128i *)(codes + i));
            const __m128i firsts = _mm_and_si128(pairs, nibble);
            const __m128i seconds = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
            const __m128i both = _mm_unpacklo_epi8(firsts, seconds);
            const __m256 low = eight(both, below, above, scale, zero);
            const __m256 high = eight(_mm_srli_si128(both, 8), below, above, scale, zero);
            if (streamed) {
                _mm256_stream_ps(values, low);
                _mm256_stream_ps(values + 8, high);
            } else {
                _mm256_storeu_ps(values, low);
                _mm256_storeu_ps(values + 8, high);
            }
        }
    }
    if (streamed)
        _mm_sfence();
}

/* The widest vectors that this processor has: 2, 1, or 0 for none of them. */
int widest_vectors(void) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
        return 2;
    return __builtin_cpu_supports("avx2") ? 1 : 0;
}
#else
int widest_vectors(void) { return 0; }
#endif

/* Decode `count` blocks into `count * 128` floats, with vectors no wider than `vectors` (2: 64 bytes, 1: 32,
   0: plain C), which must be at most what widest_vectors() says. */
void decode_fourbit(const uint8_t *rows, ptrdiff_t count, int half, float unit, const float *levels, float zero,
                    float *values, int vectors) {
    const struct blocks it = {rows, count, half, unit, levels, zero, values};
#if defined(__x86_64__) && defined(__GNUC__)
    if (vectors == 2)
        decode_avx512(&it);
    else if (vectors == 1)
        decode_avx2(&it);
    else
#endif
        decode_anywhere(&it);
    (void)vectors;
}
