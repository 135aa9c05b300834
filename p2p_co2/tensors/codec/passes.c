/* One pass over values where torch's operations need many: fp16, int8, int4, e3m0, sign and q2, the weighted
   mean, the outer step.

   passes.py says when it is used and what holds. Built with the package where there is a C compiler: plain C11,
   nothing of Python's, every product and sum rounded by itself (no target here has fused operations), so the
   bits are those of torch's operations. Needs AVX2 and F16C, which processors have had since 2013. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 128
enum codec { FP16 = 0, INT8 = 1, INT4 = 2, E3M0 = 3, SIGN = 4, Q2 = 5 };

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

#define VECTORS __attribute__((target("avx2,f16c")))
#define INLINE VECTORS static inline __attribute__((always_inline))

#define LARGEST 3.40282346638528859812e+38f
#define LARGEST_BITS 0x7f7fffff
#define LARGEST_HALF 65504.0f
#define SMALLEST 0x1p-110f /* base.py's */
#define EIGHTS (BLOCK / 8)
#define INT8_BYTES (BLOCK + 4)
#define FOURBIT_BYTES (BLOCK / 2 + 4) /* the last four are a scale: int4's and its bias, fp16; e3m0's, fp32 */
#define LARGEST_INT4_SCALE 8188.0f /* this and the next are fourbit.py's */
#define INT4_ROUNDER (0x1.8p23f + 8.0f)
#define SMALLEST_HALF 0x1p-24f
#define PLANE 64 /* a bit of each of the 512 values of a block of sign or q2, in 64 vectors */
#define LONG 1.25f /* this and the next are bitplanes.py's */
#define MOST_LONG 358
/* From this many vectors on (16 MiB of values) the result does not stay in a cache anyway: it goes past the
   caches to memory, which spares reading each line before it is written. */
#define STREAMED_EIGHTS (1 << 19)

INLINE __m256i magnitude_bits(__m256 values) {
    return _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7fffffff));
}

INLINE int32_t largest_of(__m256i bits) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    return _mm_cvtsi128_si32(most);
}

INLINE float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE __m256 clamped(__m256 values, float least, float most) {
    /* In this order, as torch: of two zeros, which compare equal, the value's own sign stays. */
    return _mm256_min_ps(_mm256_set1_ps(most), _mm256_max_ps(_mm256_set1_ps(least), values));
}

/* ---- one block, its 128 or 512 values in 16 or 64 vectors */

/* Whether all that the block's bytes decode to is finite. */
INLINE int decode_half(const uint8_t *row, __m256 *values) {
    const __m128i exponent = _mm_set1_epi16(0x7c00);
    __m128i odd = _mm_setzero_si128();
    for (int i = 0; i < EIGHTS; i++) {
        const __m128i halves = _mm_loadu_si128((const __m128i *)(row + 16 * i));
        odd = _mm_or_si128(odd, _mm_cmpeq_epi16(_mm_and_si128(halves, exponent), exponent));
        values[i] = _mm256_cvtph_ps(halves);
    }
    return _mm_testz_si128(odd, odd);
}

INLINE int decode_int8(const uint8_t *row, __m256 *values, int32_t limit_bits) {
    const __m256i most = _mm256_set1_epi32(254), zero = _mm256_set1_epi32(127);
    int32_t bits;
    memcpy(&bits, row + BLOCK, sizeof bits);
    const __m256 scale = _mm256_set1_ps(float_of(bits));
    for (int i = 0; i < EIGHTS; i++) {
        const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(row + 8 * i)));
        const __m256i steps = _mm256_sub_epi32(_mm256_min_epi32(codes, most), zero);
        values[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(steps), scale);
    }
    return bits >= 0 && bits <= limit_bits;
}

INLINE __m256 of_codes(__m128i codes, __m256 scale) {
    const __m256i steps = _mm256_sub_epi32(_mm256_cvtepu8_epi32(codes), _mm256_set1_epi32(8));
    return _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(steps), scale), _mm256_setzero_ps());
}

INLINE int decode_int4(const uint8_t *row, __m256 *values) {
    uint16_t half, bias;
    memcpy(&half, row + BLOCK / 2, sizeof half);
    memcpy(&bias, row + BLOCK / 2 + 2, sizeof bias);
    const float scale = _cvtsh_ss(half);
    const __m256 scales = _mm256_set1_ps(scale);
    const __m128i nibble = _mm_set1_epi8(15);
    for (int i = 0; i < EIGHTS; i += 2) {
        const __m128i pairs = _mm_loadl_epi64((const __m128i *)(row + 4 * i));
        const __m128i firsts = _mm_and_si128(pairs, nibble);
        const __m128i seconds = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
        const __m128i both = _mm_unpacklo_epi8(firsts, seconds);
        values[i] = of_codes(both, scales);
        values[i + 1] = of_codes(_mm_srli_si128(both, 8), scales);
    }
    return half < 0x8000 && scale <= LARGEST_INT4_SCALE &&
           bias == _cvtss_sh(-8.0f * scale, _MM_FROUND_TO_NEAREST_INT);
}

INLINE int decode_e3m0(const uint8_t *row, __m256 *values, int32_t limit_bits) {
    /* In quarters of a scale. */
    const __m128i steps = _mm_setr_epi8(0, 1, 2, 4, 8, 16, 32, 64, 0, -1, -2, -4, -8, -16, -32, -64);
    const __m128i nibble = _mm_set1_epi8(15);
    int32_t bits;
    memcpy(&bits, row + BLOCK / 2, sizeof bits);
    const __m256 unit = _mm256_set1_ps(float_of(bits) * 0.25f);
    for (int i = 0; i < EIGHTS; i += 2) {
        const __m128i pairs = _mm_loadl_epi64((const __m128i *)(row + 4 * i));
        const __m128i firsts = _mm_shuffle_epi8(steps, _mm_and_si128(pairs, nibble));
        const __m128i seconds = _mm_shuffle_epi8(steps, _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble));
        const __m128i both = _mm_unpacklo_epi8(firsts, seconds);
        values[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(both)), unit);
        const __m128i rest = _mm_srli_si128(both, 8);
        values[i + 1] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(rest)), unit);
    }
    return bits >= 0 && bits <= limit_bits;
}

/* The bits of 8 values, from bit `at` of the word on, as the signs of their lanes. */
INLINE __m256i lanes_of(uint32_t word, int at) {
    const __m256i lifts = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    return _mm256_sllv_epi32(_mm256_set1_epi32((int32_t)(word >> at)), lifts);
}

INLINE int decode_planes(int codec, const uint8_t *row, __m256 *values, int32_t limit_bits) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    uint32_t signs, longs;
    int32_t bits;
    memcpy(&bits, row + (codec == Q2 ? 2 * PLANE : PLANE), sizeof bits);
    const float scale = float_of(bits);
    const __m256 one = _mm256_set1_ps(codec == Q2 ? 3.0f * scale : scale), ten = _mm256_set1_ps(10.0f * scale);
    for (int i = 0; i < PLANE; i += 4) {
        memcpy(&signs, row + i, sizeof signs);
        memcpy(&longs, row + (codec == Q2 ? PLANE : 0) + i, sizeof longs);
        for (int j = 0; j < 4; j++) {
            const __m256 negative = _mm256_and_ps(_mm256_castsi256_ps(lanes_of(signs, 8 * j)), sign);
            const __m256 is_long = _mm256_castsi256_ps(lanes_of(longs, 8 * j));
            values[i + j] = _mm256_xor_ps(codec == Q2 ? _mm256_blendv_ps(one, ten, is_long) : one, negative);
        }
    }
    return bits >= 0 && bits <= limit_bits;
}

INLINE int eights_of(int codec) {
    return codec >= SIGN ? PLANE : EIGHTS;
}

INLINE ptrdiff_t width_of(int codec) {
    return codec == FP16   ? 2 * BLOCK
           : codec == INT8 ? INT8_BYTES
           : codec == Q2   ? 2 * PLANE + 4
                           : FOURBIT_BYTES; /* sign's, too */
}

INLINE int decode_block(int codec, const uint8_t *row, __m256 *values, int32_t limit_bits) {
    return codec == FP16   ? decode_half(row, values)
           : codec == INT8 ? decode_int8(row, values, limit_bits)
           : codec == INT4 ? decode_int4(row, values)
           : codec == E3M0 ? decode_e3m0(row, values, limit_bits)
                           : decode_planes(codec, row, values, limit_bits);
}

INLINE void encode_half(const __m256 *values, uint8_t *row) {
    for (int i = 0; i < EIGHTS; i++) {
        const __m256 kept = clamped(values[i], -LARGEST_HALF, LARGEST_HALF);
        _mm_storeu_si128((__m128i *)(row + 16 * i), _mm256_cvtps_ph(kept, _MM_FROUND_TO_NEAREST_INT));
    }
}

INLINE __m256i code_of(__m256 values, __m256 inverse) {
    const __m256 steps = _mm256_round_ps(
        _mm256_mul_ps(values, inverse), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_cvttps_epi32(clamped(_mm256_add_ps(steps, _mm256_set1_ps(127.0f)), 0.0f, 254.0f));
}

INLINE void encode_int8(const __m256 *values, uint8_t *row, int32_t most_bits, int32_t limit_bits) {
    const float most = float_of(most_bits), limit = float_of(limit_bits);
    float scale = (most < SMALLEST ? 0.0f : most) / 127.0f;
    scale = scale > limit ? limit : scale;
    const __m256 inverse = _mm256_set1_ps(scale > 0.0f ? 1.0f / scale : 0.0f);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing works in halves of a vector */
    for (int i = 0; i < EIGHTS; i += 4) {
        const __m256i low = _mm256_packs_epi32(code_of(values[i], inverse), code_of(values[i + 1], inverse));
        const __m256i high =
            _mm256_packs_epi32(code_of(values[i + 2], inverse), code_of(values[i + 3], inverse));
        const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256((__m256i *)(row + 8 * i), codes);
    }
    memcpy(row + BLOCK, &scale, sizeof scale);
}

INLINE float int4_scale_of(float most) {
    float scale = most / 7.0f;
    if (most <= 0.5f * SMALLEST_HALF)
        return 0.0f;
    if (scale > LARGEST_INT4_SCALE)
        return LARGEST_INT4_SCALE;
    if (scale < 8.0f * SMALLEST_HALF) { /* up to a power of two */
        int32_t bits;
        memcpy(&bits, &scale, sizeof bits);
        scale = float_of((bits + 0x7fffff) & ~0x7fffff);
        return scale < SMALLEST_HALF ? SMALLEST_HALF : scale;
    }
    return scale;
}

INLINE __m256i int4_code_of(__m256 values, __m256 scale) {
    /* The ratio is above 7 by rounding, or where the scale is the largest. */
    const __m256 steps = clamped(_mm256_div_ps(values, scale), -7.0f, 7.0f);
    const __m256 rounded = _mm256_add_ps(steps, _mm256_set1_ps(INT4_ROUNDER));
    return _mm256_and_si256(_mm256_castps_si256(rounded), _mm256_set1_epi32(0xff));
}

/* fourbit.py says how the exponent and the first bit of the mantissa decide. */
INLINE __m256i e3m0_code_of(__m256 values, __m256 most) {
    const __m256i bits = _mm256_castps_si256(_mm256_div_ps(values, most)), zero = _mm256_set1_epi32(239);
    const __m256i halves = _mm256_and_si256(_mm256_srli_epi32(bits, 22), _mm256_set1_epi32(0xff));
    const __m256i steps = _mm256_sub_epi32(_mm256_max_epi32(halves, zero), zero);
    const __m256i least = _mm256_min_epi32(steps, _mm256_set1_epi32(1));
    const __m256i magnitudes = _mm256_max_epi32(_mm256_srli_epi32(steps, 1), least);
    const __m256i signs = _mm256_and_si256(_mm256_srli_epi32(bits, 28), _mm256_set1_epi32(8));
    const __m256i none = _mm256_cmpeq_epi32(magnitudes, _mm256_setzero_si256());
    return _mm256_or_si256(magnitudes, _mm256_andnot_si256(none, signs)); /* zero has no sign */
}

/* The codes of 32 values, a byte each, in order. */
INLINE __m256i fourbit_codes_of(int codec, const __m256 *values, __m256 scale) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing works in halves of a vector */
    __m256i codes[4];
    for (int i = 0; i < 4; i++)
        codes[i] = codec == INT4 ? int4_code_of(values[i], scale) : e3m0_code_of(values[i], scale);
    const __m256i low = _mm256_packs_epi32(codes[0], codes[1]), high = _mm256_packs_epi32(codes[2], codes[3]);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
}

INLINE void pack_fourbit(int codec, const __m256 *values, float scale, uint8_t *row) {
    const __m256 scales = _mm256_set1_ps(scale == 0.0f ? 1.0f : scale);
    const __m256i first_and_16_seconds = _mm256_set1_epi16(0x1001);
    for (int i = 0; i < EIGHTS; i += 8) {
        const __m256i firsts = fourbit_codes_of(codec, values + i, scales);
        const __m256i rest = fourbit_codes_of(codec, values + i + 4, scales);
        const __m256i low = _mm256_maddubs_epi16(firsts, first_and_16_seconds);
        const __m256i high = _mm256_maddubs_epi16(rest, first_and_16_seconds);
        const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8);
        _mm256_storeu_si256((__m256i *)(row + 4 * i), pairs);
    }
}

INLINE void encode_int4(const __m256 *values, uint8_t *row, int32_t most_bits) {
    const uint16_t half = (uint16_t)_cvtss_sh(int4_scale_of(float_of(most_bits)), _MM_FROUND_TO_NEAREST_INT);
    const float scale = _cvtsh_ss(half);
    const uint16_t bias = (uint16_t)_cvtss_sh(-8.0f * scale, _MM_FROUND_TO_NEAREST_INT);
    pack_fourbit(INT4, values, scale, row);
    memcpy(row + BLOCK / 2, &half, sizeof half);
    memcpy(row + BLOCK / 2 + 2, &bias, sizeof bias);
}

INLINE void encode_e3m0(const __m256 *values, uint8_t *row, int32_t most_bits) {
    const float most = float_of(most_bits) < SMALLEST ? 0.0f : float_of(most_bits), scale = most / 16.0f;
    pack_fourbit(E3M0, values, most, row);
    memcpy(row + BLOCK / 2, &scale, sizeof scale);
}

INLINE __m256 shares_of(__m256 values) {
    return _mm256_mul_ps(_mm256_castsi256_ps(magnitude_bits(values)), _mm256_set1_ps(0x1p-9f));
}

/* The sum of 512 values, half of them added to the other half until one is left. */
INLINE float folded(__m256 *parts) {
    for (int half = PLANE / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            parts[i] = _mm256_add_ps(parts[i], parts[i + half]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(parts[0]), _mm256_extractf128_ps(parts[0], 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

INLINE void pack_signs(const __m256 *values, uint8_t *plane) {
    for (int i = 0; i < PLANE; i++)
        plane[i] = (uint8_t)_mm256_movemask_ps(values[i]);
}

INLINE float q2_scale_of(const __m256 *values, float mean, uint8_t *plane, int32_t limit_bits) {
    const __m256 bound = _mm256_set1_ps(mean * LONG);
    __m256 is_long[PLANE], parts[PLANE];
    __m256i count = _mm256_setzero_si256();
    for (int i = 0; i < PLANE; i++) {
        is_long[i] = _mm256_cmp_ps(_mm256_castsi256_ps(magnitude_bits(values[i])), bound, _CMP_GT_OQ);
        parts[i] = _mm256_and_ps(shares_of(values[i]), is_long[i]);
        count = _mm256_sub_epi32(count, _mm256_castps_si256(is_long[i]));
    }
    int32_t eight[8], longs = 0;
    _mm256_storeu_si256((__m256i *)eight, count);
    for (int i = 0; i < 8; i++)
        longs += eight[i];
    if (longs > MOST_LONG) {
        longs = 0;
        for (int i = 0; i < PLANE; i++)
            is_long[i] = parts[i] = _mm256_setzero_ps();
    }
    pack_signs(is_long, plane);
    const double squares = longs * (91.0 / 512.0) + 9.0;
    const float scale = (float)((mean * 3.0 + folded(parts) * 7.0) / squares);
    int32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0x8000) & ~0xffff;
    return float_of(bits < limit_bits ? bits : limit_bits);
}

INLINE void encode_planes(int codec, const __m256 *values, uint8_t *row, int32_t limit_bits) {
    __m256 parts[PLANE];
    for (int i = 0; i < PLANE; i++)
        parts[i] = shares_of(values[i]);
    float scale = folded(parts);
    pack_signs(values, row);
    if (codec == Q2)
        scale = q2_scale_of(values, scale, row + PLANE, limit_bits);
    scale = scale < SMALLEST ? 0.0f : scale;
    memcpy(row + (codec == Q2 ? 2 * PLANE : PLANE), &scale, sizeof scale);
}

/* Whether the values are finite; if not, nothing is written. */
INLINE int encode_block(int codec, const __m256 *values, uint8_t *row, int32_t limit_bits) {
    __m256i bits = _mm256_setzero_si256();
    for (int i = 0; i < eights_of(codec); i++)
        bits = _mm256_max_epi32(bits, magnitude_bits(values[i]));
    const int32_t most_bits = largest_of(bits);
    if (most_bits > LARGEST_BITS)
        return 0;
    if (codec == FP16)
        encode_half(values, row);
    else if (codec == INT8)
        encode_int8(values, row, most_bits, limit_bits);
    else if (codec == INT4)
        encode_int4(values, row, most_bits);
    else if (codec == E3M0)
        encode_e3m0(values, row, most_bits);
    else
        encode_planes(codec, values, row, limit_bits);
    return 1;
}

INLINE __m256d square_sum_of(__m256d sum, __m256 values) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1));
    sum = _mm256_add_pd(sum, _mm256_mul_pd(low, low));
    return _mm256_add_pd(sum, _mm256_mul_pd(high, high));
}

INLINE double total_of(__m256d sum) {
    double four[4];
    _mm256_storeu_pd(four, sum);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

/* ---- codecs */

/* Each codec by name, so that the compiler makes a loop for each. */
#define OF_CODEC(work, ...)                                                                                   \
    switch (codec) {                                                                                          \
    case FP16: return work(FP16, __VA_ARGS__);                                                                \
    case INT8: return work(INT8, __VA_ARGS__);                                                                \
    case INT4: return work(INT4, __VA_ARGS__);                                                                \
    case E3M0: return work(E3M0, __VA_ARGS__);                                                                \
    case SIGN: return work(SIGN, __VA_ARGS__);                                                                \
    default: return work(Q2, __VA_ARGS__);                                                                    \
    }

/* Encode `blocks` blocks of `base - values + residual * decay`: of `values` where `base` is null, and without
   the residual where that is. `wanted`, if not null, takes what was encoded, `lost` what of it is not decoded
   again. Returns the number of blocks done: less than `blocks` if the next one is not finite. */
INLINE ptrdiff_t encode(int codec, const float *base, const float *values, const float *residual, float *wanted,
                        float *lost, float decay, ptrdiff_t blocks, uint8_t *rows, int32_t limit_bits) {
    const ptrdiff_t width = width_of(codec);
    const int eights = eights_of(codec);
    const __m256 decays = _mm256_set1_ps(decay);
    ptrdiff_t block;
    for (block = 0; block < blocks; block++) {
        __m256 mine[PLANE], back[PLANE];
        uint8_t *row = rows + block * width;
        for (int i = 0; i < eights; i++) {
            const ptrdiff_t at = 8 * (block * eights + i);
            mine[i] = _mm256_loadu_ps(values + at);
            if (base)
                mine[i] = _mm256_sub_ps(_mm256_loadu_ps(base + at), mine[i]);
            if (residual)
                mine[i] = _mm256_add_ps(mine[i], _mm256_mul_ps(_mm256_loadu_ps(residual + at), decays));
            if (wanted)
                _mm256_storeu_ps(wanted + at, mine[i]);
        }
        if (!encode_block(codec, mine, row, limit_bits))
            break;
        if (lost) {
            decode_block(codec, row, back, limit_bits);
            for (int i = 0; i < eights; i++)
                _mm256_storeu_ps(lost + 8 * (block * eights + i), _mm256_sub_ps(mine[i], back[i]));
        }
    }
    return block;
}

VECTORS ptrdiff_t encode_rows(int codec, const float *base, const float *values, const float *residual,
                              float *wanted, float *lost, float decay, ptrdiff_t blocks, uint8_t *rows,
                              int32_t limit_bits) {
    OF_CODEC(encode, base, values, residual, wanted, lost, decay, blocks, rows, limit_bits)
}

INLINE ptrdiff_t decode(int codec, const uint8_t *rows, ptrdiff_t blocks, float *values, int32_t limit_bits) {
    const ptrdiff_t width = width_of(codec);
    const int eights = eights_of(codec);
    const int streamed = blocks * eights >= STREAMED_EIGHTS && ((uintptr_t)values & 31) == 0;
    ptrdiff_t sound = 0;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        __m256 back[PLANE];
        sound += decode_block(codec, rows + block * width, back, limit_bits);
        for (int i = 0; i < eights; i++) {
            if (streamed)
                _mm256_stream_ps(values + 8 * (block * eights + i), back[i]);
            else
                _mm256_storeu_ps(values + 8 * (block * eights + i), back[i]);
        }
    }
    if (streamed)
        _mm_sfence();
    return sound;
}

/* Decode `blocks` blocks; returns how many of them hold only finite values. */
VECTORS ptrdiff_t decode_blocks(int codec, const uint8_t *rows, ptrdiff_t blocks, float *values,
                                int32_t limit_bits) {
    OF_CODEC(decode, rows, blocks, values, limit_bits)
}

INLINE ptrdiff_t mean(int codec, const uint8_t *const *slices, const float *shares, ptrdiff_t count,
                      ptrdiff_t blocks, uint8_t *rows, int32_t limit_bits) {
    const ptrdiff_t width = width_of(codec);
    const int eights = eights_of(codec);
    for (ptrdiff_t block = 0; block < blocks; block++) {
        __m256 sum[PLANE] = {_mm256_setzero_ps()}, one[PLANE];
        for (ptrdiff_t slice = 0; slice < count; slice++) {
            const __m256 share = _mm256_set1_ps(shares[slice]);
            if (!decode_block(codec, slices[slice] + block * width, one, limit_bits))
                return slice;
            for (int i = 0; i < eights; i++) {
                const __m256 part = _mm256_mul_ps(one[i], share);
                sum[i] = slice ? _mm256_add_ps(sum[i], part) : part;
            }
        }
        for (int i = 0; i < eights; i++)
            sum[i] = clamped(sum[i], -LARGEST, LARGEST);
        encode_block(codec, sum, rows + block * width, limit_bits);
    }
    return -1;
}

/* Encode the sum of `shares[i] * slices[i]`, added in this order; returns the first slice found that is not
   finite, or -1. `count` is at least 1. */
VECTORS ptrdiff_t mean_of_blocks(int codec, const uint8_t *const *slices, const float *shares, ptrdiff_t count,
                                 ptrdiff_t blocks, uint8_t *rows, int32_t limit_bits) {
    OF_CODEC(mean, slices, shares, count, blocks, rows, limit_bits)
}

/* ---- fp32 values */

/* The largest magnitude, as bits: above LARGEST_BITS if a value is not finite. */
VECTORS int32_t largest_bits(const float *values, ptrdiff_t count) {
    __m256i most[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                       _mm256_setzero_si256()};
    ptrdiff_t at = 0;
    for (; at + 32 <= count; at += 32)
        for (int i = 0; i < 4; i++)
            most[i] = _mm256_max_epi32(most[i], magnitude_bits(_mm256_loadu_ps(values + at + 8 * i)));
    most[0] = _mm256_max_epi32(_mm256_max_epi32(most[0], most[1]), _mm256_max_epi32(most[2], most[3]));
    int32_t largest = largest_of(most[0]);
    for (; at < count; at++) {
        int32_t bits;
        memcpy(&bits, values + at, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

INLINE __m256i squares_of(__m256i sum, __m256 values, __m256 scale) {
    const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(values, scale)); /* nearest, ties to even */
    const __m256i odd = _mm256_srli_epi64(whole, 32);
    sum = _mm256_add_epi64(sum, _mm256_mul_epi32(whole, whole));
    return _mm256_add_epi64(sum, _mm256_mul_epi32(odd, odd));
}

INLINE int64_t whole_sum(__m256i sum) {
    int64_t four[4];
    _mm256_storeu_si256((__m256i *)four, sum);
    return four[0] + four[1] + four[2] + four[3];
}

/* The eight values at `at`, zeros from `count` on. */
INLINE __m256 some(const float *values, ptrdiff_t at, ptrdiff_t count) {
    float eight[8] = {0};
    if (at + 8 <= count)
        return _mm256_loadu_ps(values + at);
    memcpy(eight, values + at, (size_t)(count - at) * sizeof *values);
    return _mm256_loadu_ps(eight);
}

INLINE void put(float *values, ptrdiff_t at, ptrdiff_t count, __m256 what) {
    float eight[8];
    if (at + 8 <= count) {
        _mm256_storeu_ps(values + at, what);
        return;
    }
    _mm256_storeu_ps(eight, what);
    memcpy(values + at, eight, (size_t)(count - at) * sizeof *values);
}

/* The sum of the squares of `values * scale`, each rounded to an integer. Exact as long as those are at most
   2^18 and `count` at most 2^26. */
VECTORS int64_t whole_square_sum(const float *values, ptrdiff_t count, float scale) {
    __m256i sum = _mm256_setzero_si256();
    for (ptrdiff_t at = 0; at < count; at += 8)
        sum = squares_of(sum, some(values, at, count), _mm256_set1_ps(scale));
    return whole_sum(sum);
}

struct step {
    float beta, inverse, lr;
    int nesterov;
    double bound; /* the magnitude at which momentum is clipped, infinite for never */
    double energy;
};

INLINE int32_t change_of_piece(struct step *it, const float *old, const float *mean, ptrdiff_t count,
                               float *momentum, float *change) {
    const __m256 beta = _mm256_set1_ps(it->beta), inverse = _mm256_set1_ps(it->inverse);
    const __m256 lr = _mm256_set1_ps(it->lr);
    const int nesterov = it->nesterov;
    __m256i largest = _mm256_setzero_si256(), most = _mm256_setzero_si256();
    __m256d energy = _mm256_setzero_pd();
    for (ptrdiff_t at = 0; at < count; at += 8) {
        const __m256 applied = _mm256_mul_ps(some(mean, at, count), inverse); /* by 1.0 changes nothing */
        const __m256 new = _mm256_add_ps(_mm256_mul_ps(some(old, at, count), beta), applied);
        most = _mm256_max_epi32(most, magnitude_bits(new));
        put(momentum, at, count, new);
        put(change, at, count, applied);
    }
    const float bound = (float)it->bound;
    const int clips = (double)float_of(largest_of(most)) > it->bound;
    for (ptrdiff_t at = 0; at < count; at += 8) {
        __m256 new = some(momentum, at, count);
        if (clips) {
            new = clamped(new, -bound, bound);
            put(momentum, at, count, new);
        }
        __m256 step = nesterov ? _mm256_add_ps(_mm256_mul_ps(new, beta), some(change, at, count)) : new;
        step = _mm256_mul_ps(step, lr);
        largest = _mm256_max_epi32(largest, magnitude_bits(step));
        put(change, at, count, step);
        energy = square_sum_of(energy, new);
    }
    it->energy += total_of(energy);
    return largest_of(largest);
}

/* The new momentum, and the change that the parameters lose; outer.py has the equations. `change` may be
   `mean`, `momentum` may be `old`; `piece` values are worked on at once. Returns the largest magnitude of the
   change, as bits. */
VECTORS int32_t step_of(struct step *it, const float *old, const float *mean, ptrdiff_t count, ptrdiff_t piece,
                        float *momentum, float *change) {
    int32_t largest = 0;
    for (ptrdiff_t at = 0; at < count; at += piece) {
        const ptrdiff_t size = count - at < piece ? count - at : piece;
        const int32_t here = change_of_piece(it, old + at, mean + at, size, momentum + at, change + at);
        largest = here > largest ? here : largest;
    }
    return largest;
}

/* Turn `change` into `params - change`; adds up the squares of the change as `whole_square_sum` does. Returns
   the largest magnitude of the new parameters, as bits. */
VECTORS int32_t take_change(float *change, const float *params, ptrdiff_t count, float scale, int64_t *total) {
    __m256i sum = _mm256_setzero_si256(), largest = _mm256_setzero_si256();
    for (ptrdiff_t at = 0; at < count; at += 8) {
        const __m256 lost = some(change, at, count);
        const __m256 kept = _mm256_sub_ps(some(params, at, count), lost);
        sum = squares_of(sum, lost, _mm256_set1_ps(scale));
        largest = _mm256_max_epi32(largest, magnitude_bits(kept));
        put(change, at, count, kept);
    }
    *total = whole_sum(sum);
    return largest_of(largest);
}

/* How many codecs there are here: 0 if this processor can run none. */
int codecs_in_passes(void) {
    unsigned a, b, c, d; /* older compilers cannot be asked for F16C */
    const int fits = __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
    return fits ? Q2 + 1 : 0;
}
#else
int codecs_in_passes(void) { return 0; }
#endif
