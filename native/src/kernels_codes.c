/* Values to 8-bit codes and back, block by block. */
#include <errno.h>

#include "kernels_codes.h"
#include "kernels_vector.h"

/* [Note: 8-bit codes]
 * A block of TM_QUANT_BLOCK values has the scale s = its largest magnitude, and a value is sign and
 * code c for s * unit(c) / unit(top). unit(c) is a small float without infinities: c itself below
 * 2^M (subnormal), and otherwise M = 3 bits of mantissa below an exponent, of 4 bits and a sign where
 * the block is signed, of 5 bits where not: 18 and 34 binades down from s.
 *
 *   quantize:    y = |x| * (unit(top) / s);  c = y to the nearest unit(c), ties to even
 *   dequantize:  x = (unit(c) * (1 / unit(top))) * s
 * each operation rounded to fp32.
 *
 * Quantizing what was dequantized gives the same codes and scale, bit by bit. 1 / unit(top) is rounded
 * such that unit(top) times it is exactly 1, so the largest element is s again. The bounds between
 * other codes are 2^-5 away from them, and the roundings above move y by less than 2^-21. For that no
 * product may be denormal, so scales below TM_SCALE_MIN do not exist: such a block gets TM_SCALE_MIN,
 * or, when all codes would be zero, the scale 0. What gets lost there is below 2^-110.
 *
 * A positive value of an unsigned block never gets the code 0: the next step would divide by nothing
 * but eps. A block with a NaN or an infinity, or, unsigned, with a negative value, has the scale NaN
 * and codes 0: all its values are read back as NaN. Zeros keep their sign in a signed block.
 *
 * Second moments of neighbouring elements differ so much that the range matters more than a fourth bit
 * of mantissa. With the moments that AdamW had after 400 steps of a small language model, quantizing
 * both changed the update by 2.9% (root mean square) with 5 + 3 bits; with 4 + 4 bits by 2.7% for
 * beta2 = 0.999 and by 7.1% for beta2 = 0.95. (Measured once, to choose; no benchmark repeats it.)
 */
enum { TM_CODE_MANTISSA = 3, TM_CODE_SHIFT = 23 - TM_CODE_MANTISSA };
#define TM_CODE_BIAS ((uint32_t)(126 + TM_CODE_MANTISSA) << 23)
#define TM_SCALE_MIN 0x1p-92f

TM_INLINE float tm_unit(uint32_t code) {
  uint32_t normal = (code << TM_CODE_SHIFT) + TM_CODE_BIAS;
  uint32_t small = tm_bits((float)(int32_t)code);
  return tm_from_bits(code < (1u << TM_CODE_MANTISSA) ? small : normal);
}

TM_INLINE float tm_unit_top(int is_signed) { return tm_unit(is_signed ? 0x7f : 0xff); }

/* The scale for a block with this largest magnitude. */
TM_INLINE float tm_block_scale(uint32_t magnitude, int is_signed) {
  float largest = tm_from_bits(magnitude);
  if (magnitude >= 0x7f800000u) return tm_from_bits(TM_FLOAT_NAN);
  if (largest >= TM_SCALE_MIN || magnitude == 0) return largest;
  if (is_signed && largest * (tm_unit_top(1) / TM_SCALE_MIN) <= 0.5f) return 0.0f;
  return TM_SCALE_MIN;
}

/* What magnitudes are multiplied by; 0 for a block of zeros. */
TM_INLINE float tm_block_factor(float scale, int is_signed) {
  return scale > 0.0f ? tm_unit_top(is_signed) / scale : 0.0f;
}

/* ---- plain: one value --------------------------------------------------------------------- */

/* Magnitudes as integers: these order finite values, then infinity, then NaN; unsigned, anything
 * negative comes after those. */
TM_INLINE uint32_t tm_magnitude(float value, int is_signed) {
  return is_signed ? tm_bits(value) & 0x7fffffffu : tm_bits(value + 0.0f); /* -0.0 + 0.0 = 0.0 */
}

/* y is at most the top unit and a rounding. Below the first normal unit the addition rounds to an
 * integer: there fp32 has spacing 1. */
TM_INLINE uint8_t tm_encode(float value, float factor, int is_signed) {
  const uint32_t half = (1u << (TM_CODE_SHIFT - 1)) - 1, magnitude = tm_magnitude(value, is_signed);
  const float y = tm_from_bits(magnitude) * factor;
  uint32_t bits = tm_bits(y), odd = (bits >> TM_CODE_SHIFT) & 1u;
  uint32_t normal = (bits + (half - TM_CODE_BIAS) + odd) >> TM_CODE_SHIFT;
  uint32_t small = tm_bits(y + 0x1p23f) - tm_bits(0x1p23f);
  uint32_t code = y < (float)(1 << TM_CODE_MANTISSA) ? small : normal;
  if (is_signed) return (uint8_t)(code | ((tm_bits(value) >> 24) & 0x80u));
  return (uint8_t)(code == 0 && magnitude != 0 ? 1 : code);
}

/* inverse is 1 / unit(top). */
TM_INLINE float tm_decode(uint8_t code, float inverse, float scale, int is_signed) {
  float magnitude = tm_unit(is_signed ? code & 0x7fu : code) * inverse * scale;
  return is_signed ? tm_from_bits(tm_bits(magnitude) | (code & 0x80u) << 24) : magnitude;
}

#if TM_X86
/* ---- AVX2: 8 values ----------------------------------------------------------------------- */

TM_INLINE TM_TARGET_AVX2 __m256i tm_magnitude8(__m256 value, int is_signed) {
  if (!is_signed) return _mm256_castps_si256(_mm256_add_ps(value, _mm256_setzero_ps()));
  return _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fffffff));
}

/* The low bytes of 8 words below 256, in order. */
TM_INLINE TM_TARGET_AVX2 void tm_store_bytes8(uint8_t *to, __m256i words) {
  __m128i halves = tm_narrow8(words);
  _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(halves, halves));
}

TM_INLINE TM_TARGET_AVX2 void tm_encode8(uint8_t *to, __m256 value, __m256 factor, int is_signed) {
  const __m256i half = _mm256_set1_epi32((int)((1u << (TM_CODE_SHIFT - 1)) - 1 - TM_CODE_BIAS));
  const __m256 magic = _mm256_set1_ps(0x1p23f);
  const __m256i magnitude = tm_magnitude8(value, is_signed);
  const __m256 y = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), factor);
  __m256i bits = _mm256_castps_si256(y);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, TM_CODE_SHIFT), _mm256_set1_epi32(1));
  __m256i normal = _mm256_add_epi32(_mm256_add_epi32(bits, half), odd);
  __m256i small = _mm256_castps_si256(_mm256_add_ps(y, magic));
  __m256 is_small = _mm256_cmp_ps(y, _mm256_set1_ps(1 << TM_CODE_MANTISSA), _CMP_LT_OQ);
  normal = _mm256_srli_epi32(normal, TM_CODE_SHIFT);
  small = _mm256_sub_epi32(small, _mm256_castps_si256(magic));
  __m256i code = _mm256_blendv_epi8(normal, small, _mm256_castps_si256(is_small));
  if (is_signed) {
    __m256i sign = _mm256_srli_epi32(_mm256_castps_si256(value), 24);
    code = _mm256_or_si256(code, _mm256_and_si256(sign, _mm256_set1_epi32(0x80)));
  } else { /* minus one where not zero, and then at least that */
    __m256i zero = _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256());
    code = _mm256_max_epi32(code, _mm256_add_epi32(zero, _mm256_set1_epi32(1)));
  }
  tm_store_bytes8(to, code);
}

TM_INLINE TM_TARGET_AVX2 __m256 tm_decode8(const uint8_t *from, __m256 inverse, __m256 scale,
                                           int is_signed) {
  __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
  __m256i code = is_signed ? _mm256_and_si256(byte, _mm256_set1_epi32(0x7f)) : byte;
  __m256i normal = _mm256_slli_epi32(code, TM_CODE_SHIFT);
  normal = _mm256_add_epi32(normal, _mm256_set1_epi32((int)TM_CODE_BIAS));
  __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(1 << TM_CODE_MANTISSA), code);
  __m256 unit = _mm256_blendv_ps(_mm256_castsi256_ps(normal), _mm256_cvtepi32_ps(code),
                                 _mm256_castsi256_ps(is_small));
  __m256 magnitude = _mm256_mul_ps(_mm256_mul_ps(unit, inverse), scale);
  if (!is_signed) return magnitude;
  __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(byte, code), 24);
  return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
}

/* ---- AVX-512: 16 values ------------------------------------------------------------------- */

TM_INLINE TM_TARGET_AVX512 __m512i tm_magnitude16(__m512 value, int is_signed) {
  if (!is_signed) return _mm512_castps_si512(_mm512_add_ps(value, _mm512_setzero_ps()));
  return _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fffffff));
}

TM_INLINE TM_TARGET_AVX512 void tm_encode16(uint8_t *to, __m512 value, __m512 factor,
                                            int is_signed) {
  const __m512i half = _mm512_set1_epi32((int)((1u << (TM_CODE_SHIFT - 1)) - 1 - TM_CODE_BIAS));
  const __m512 magic = _mm512_set1_ps(0x1p23f);
  const __m512i magnitude = tm_magnitude16(value, is_signed);
  const __m512 y = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), factor);
  __m512i bits = _mm512_castps_si512(y);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, TM_CODE_SHIFT), _mm512_set1_epi32(1));
  __m512i normal = _mm512_add_epi32(_mm512_add_epi32(bits, half), odd);
  __m512i small = _mm512_castps_si512(_mm512_add_ps(y, magic));
  __mmask16 is_small = _mm512_cmp_ps_mask(y, _mm512_set1_ps(1 << TM_CODE_MANTISSA), _CMP_LT_OQ);
  normal = _mm512_srli_epi32(normal, TM_CODE_SHIFT);
  __m512i code = _mm512_mask_sub_epi32(normal, is_small, small, _mm512_castps_si512(magic));
  if (is_signed) {
    __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(value), 24);
    code = _mm512_or_si512(code, _mm512_and_si512(sign, _mm512_set1_epi32(0x80)));
  } else {
    __mmask16 positive = _mm512_test_epi32_mask(magnitude, magnitude);
    code = _mm512_mask_max_epu32(code, positive, code, _mm512_set1_epi32(1));
  }
  _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(code));
}

TM_INLINE TM_TARGET_AVX512 __m512 tm_decode16(const uint8_t *from, __m512 inverse, __m512 scale,
                                              int is_signed) {
  __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
  __m512i code = is_signed ? _mm512_and_si512(byte, _mm512_set1_epi32(0x7f)) : byte;
  __m512i normal = _mm512_slli_epi32(code, TM_CODE_SHIFT);
  normal = _mm512_add_epi32(normal, _mm512_set1_epi32((int)TM_CODE_BIAS));
  __mmask16 is_small = _mm512_cmplt_epi32_mask(code, _mm512_set1_epi32(1 << TM_CODE_MANTISSA));
  __m512 unit = _mm512_mask_cvtepi32_ps(_mm512_castsi512_ps(normal), is_small, code);
  __m512 magnitude = _mm512_mul_ps(_mm512_mul_ps(unit, inverse), scale);
  if (!is_signed) return magnitude;
  __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(byte, code), 24);
  return _mm512_or_ps(magnitude, _mm512_castsi512_ps(sign));
}
#endif

/* ---- blocks; is_signed is a constant where these are inlined ------------------------------ */

TM_INLINE uint32_t tm_largest(const float *values, size_t n, int is_signed) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; i++) {
    uint32_t magnitude = tm_magnitude(values[i], is_signed);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

/* From element i on, given the factor; NaN has no codes. */
TM_INLINE void tm_encode_rest(const float *values, uint8_t *codes, size_t i, size_t n, float factor,
                              int is_signed) {
  for (; i < n; i++) codes[i] = tm_encode(values[i], factor, is_signed);
}

TM_INLINE void tm_decode_rest(const uint8_t *codes, float *values, size_t i, size_t n, float scale,
                              int is_signed) {
  const float inverse = 1.0f / tm_unit_top(is_signed);
  for (; i < n; i++) values[i] = tm_decode(codes[i], inverse, scale, is_signed);
}

TM_INLINE float tm_quantize_block(const float *values, uint8_t *codes, size_t n, int is_signed) {
  const float scale = tm_block_scale(tm_largest(values, n, is_signed), is_signed);
  if (scale != scale)
    memset(codes, 0, n);
  else
    tm_encode_rest(values, codes, 0, n, tm_block_factor(scale, is_signed), is_signed);
  return scale;
}

static float tm_quantize_block_plain(const float *values, uint8_t *codes, size_t n, int is_signed) {
  return is_signed ? tm_quantize_block(values, codes, n, 1) : tm_quantize_block(values, codes, n, 0);
}

static void tm_dequantize_block_plain(const uint8_t *codes, float scale, float *values, size_t n,
                                      int is_signed) {
  if (is_signed)
    tm_decode_rest(codes, values, 0, n, scale, 1);
  else
    tm_decode_rest(codes, values, 0, n, scale, 0);
}

#if TM_X86
TM_INLINE TM_TARGET_AVX2 float tm_quantize_block8(const float *values, uint8_t *codes, size_t n,
                                                 int is_signed) {
  const float scale = tm_block_scale(tm_largest(values, n, is_signed), is_signed);
  const float factor = tm_block_factor(scale, is_signed);
  const __m256 factors = _mm256_set1_ps(factor);
  size_t i = 0;
  if (scale != scale) {
    memset(codes, 0, n);
    return scale;
  }
  for (; n - i >= 8; i += 8)
    tm_encode8(codes + i, _mm256_loadu_ps(values + i), factors, is_signed);
  tm_encode_rest(values, codes, i, n, factor, is_signed);
  return scale;
}

TM_INLINE TM_TARGET_AVX2 void tm_dequantize_block8(const uint8_t *codes, float scale, float *values,
                                                  size_t n, int is_signed) {
  const __m256 inverse = _mm256_set1_ps(1.0f / tm_unit_top(is_signed)), scales = _mm256_set1_ps(scale);
  size_t i = 0;
  for (; n - i >= 8; i += 8)
    _mm256_storeu_ps(values + i, tm_decode8(codes + i, inverse, scales, is_signed));
  tm_decode_rest(codes, values, i, n, scale, is_signed);
}

TM_TARGET_AVX2 static float tm_quantize_block_avx2(const float *values, uint8_t *codes,
                                                       size_t n, int is_signed) {
  return is_signed ? tm_quantize_block8(values, codes, n, 1)
                   : tm_quantize_block8(values, codes, n, 0);
}

TM_TARGET_AVX2 static void tm_dequantize_block_avx2(const uint8_t *codes, float scale,
                                                        float *values, size_t n, int is_signed) {
  if (is_signed)
    tm_dequantize_block8(codes, scale, values, n, 1);
  else
    tm_dequantize_block8(codes, scale, values, n, 0);
}

TM_INLINE TM_TARGET_AVX512 float tm_quantize_block16(const float *values, uint8_t *codes, size_t n,
                                                 int is_signed) {
  const float scale = tm_block_scale(tm_largest(values, n, is_signed), is_signed);
  const float factor = tm_block_factor(scale, is_signed);
  const __m512 factors = _mm512_set1_ps(factor);
  size_t i = 0;
  if (scale != scale) {
    memset(codes, 0, n);
    return scale;
  }
  for (; n - i >= 16; i += 16)
    tm_encode16(codes + i, _mm512_loadu_ps(values + i), factors, is_signed);
  tm_encode_rest(values, codes, i, n, factor, is_signed);
  return scale;
}

TM_INLINE TM_TARGET_AVX512 void tm_dequantize_block16(const uint8_t *codes, float scale, float *values,
                                                  size_t n, int is_signed) {
  const __m512 inverse = _mm512_set1_ps(1.0f / tm_unit_top(is_signed)), scales = _mm512_set1_ps(scale);
  size_t i = 0;
  for (; n - i >= 16; i += 16)
    _mm512_storeu_ps(values + i, tm_decode16(codes + i, inverse, scales, is_signed));
  tm_decode_rest(codes, values, i, n, scale, is_signed);
}

TM_TARGET_AVX512 static float tm_quantize_block_avx512(const float *values, uint8_t *codes,
                                                       size_t n, int is_signed) {
  return is_signed ? tm_quantize_block16(values, codes, n, 1)
                   : tm_quantize_block16(values, codes, n, 0);
}

TM_TARGET_AVX512 static void tm_dequantize_block_avx512(const uint8_t *codes, float scale,
                                                        float *values, size_t n, int is_signed) {
  if (is_signed)
    tm_dequantize_block16(codes, scale, values, n, 1);
  else
    tm_dequantize_block16(codes, scale, values, n, 0);
}
#endif

tm_codec tm_codec_of(uint32_t isa) {
#if TM_X86
  if (isa == TM_ISA_AVX512) return (tm_codec){tm_quantize_block_avx512, tm_dequantize_block_avx512};
  if (isa == TM_ISA_AVX2) return (tm_codec){tm_quantize_block_avx2, tm_dequantize_block_avx2};
#endif
  return (tm_codec){tm_quantize_block_plain, tm_dequantize_block_plain};
}

/* ---- interface --------------------------------------------------------------------------- */

typedef struct {
  tm_codec codec;
  int is_signed;
  const float *from;
  uint8_t *codes;
  float *scales;
  float *to;
} tm_codes_job;

/* Ranges begin at a block: TM_CHUNK is a multiple of TM_QUANT_BLOCK. */

static size_t tm_block_numel(size_t begin, size_t end) {
  return end - begin < TM_QUANT_BLOCK ? end - begin : TM_QUANT_BLOCK;
}

static void tm_quantize_range(void *context, size_t begin, size_t end) {
  const tm_codes_job *job = context;
  for (size_t i = begin; i < end; i += TM_QUANT_BLOCK)
    job->scales[i / TM_QUANT_BLOCK] = job->codec.quantize(
        job->from + i, job->codes + i, tm_block_numel(i, end), job->is_signed);
}

static void tm_dequantize_range(void *context, size_t begin, size_t end) {
  const tm_codes_job *job = context;
  for (size_t i = begin; i < end; i += TM_QUANT_BLOCK)
    job->codec.dequantize(job->codes + i, job->scales[i / TM_QUANT_BLOCK], job->to + i,
                          tm_block_numel(i, end), job->is_signed);
}

static int tm_codes_run(tm_pool *pool, uint32_t isa, size_t n, tm_range_fn range, tm_codes_job *job) {
  int error = tm_isa_check(isa);
  if (error != 0) return error;
  if (n != 0 && ((job->from == NULL && job->to == NULL) || job->codes == NULL || job->scales == NULL))
    return -EINVAL;
  job->codec = tm_codec_of(isa);
  tm_pool_run(pool, n, TM_CHUNK, range, job);
  return 0;
}

int tm_quantize(tm_pool *pool, uint32_t isa, size_t n, uint32_t is_signed, const float *values,
                uint8_t *codes, float *scales) {
  tm_codes_job job = {
      .is_signed = is_signed != 0, .from = values, .codes = codes, .scales = scales};
  return tm_codes_run(pool, isa, n, tm_quantize_range, &job);
}

int tm_dequantize(tm_pool *pool, uint32_t isa, size_t n, uint32_t is_signed, const uint8_t *codes,
                  const float *scales, float *values) {
  tm_codes_job job = {.is_signed = is_signed != 0,
                      .to = values,
                      .codes = (uint8_t *)codes,
                      .scales = (float *)scales};
  return tm_codes_run(pool, isa, n, tm_dequantize_range, &job);
}
