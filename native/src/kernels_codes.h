/* Blocks of values in 8 bits each with one fp32 scale; `is_signed` and `n` are constants where these
 * are inlined. */
#ifndef TM_KERNELS_CODES_H
#define TM_KERNELS_CODES_H

#include "kernels.h"

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
 * beta2 = 0.999 and by 7.1% for beta2 = 0.95.
 */
enum { TM_CODE_MANTISSA = 3, TM_CODE_SHIFT = 23 - TM_CODE_MANTISSA };
#define TM_CODE_BIAS ((uint32_t)(126 + TM_CODE_MANTISSA) << 23)
#define TM_SCALE_MIN 0x1p-92f

/* With masks: of `condition ? a : b` the compiler makes a branch that it cannot vectorize, because
 * the operations that only one side needs could raise floating-point exceptions. */
TM_INLINE uint32_t tm_select(int condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - (uint32_t)condition;
  return (a & mask) | (b & ~mask);
}

TM_INLINE float tm_unit(uint32_t code) {
  uint32_t normal = (code << TM_CODE_SHIFT) + TM_CODE_BIAS;
  uint32_t small = tm_bits((float)(int32_t)code);
  return tm_from_bits(tm_select(code < (1u << TM_CODE_MANTISSA), small, normal));
}

TM_INLINE float tm_unit_top(int is_signed) { return tm_unit(is_signed ? 0x7f : 0xff); }

TM_INLINE void tm_dequantize_block(const uint8_t *restrict codes, float scale,
                                   float *restrict values, size_t n, int is_signed) {
  const float inverse = 1.0f / tm_unit_top(is_signed);
  for (size_t i = 0; i < n; i++) {
    uint32_t code = codes[i], sign = is_signed ? (code & 0x80u) << 24 : 0;
    float magnitude = tm_unit(is_signed ? code & 0x7fu : code) * inverse * scale;
    values[i] = tm_from_bits(tm_bits(magnitude) | sign);
  }
}

/* Magnitudes as integers: these order finite values, then infinity, then NaN; unsigned, anything
 * negative comes after those. */
TM_INLINE uint32_t tm_magnitude(float value, int is_signed) {
  return is_signed ? tm_bits(value) & 0x7fffffffu : tm_bits(value + 0.0f); /* -0.0 + 0.0 = 0.0 */
}

/* The scale for a block whose largest magnitude is this. */
TM_INLINE float tm_block_scale(uint32_t magnitude, int is_signed) {
  float largest = tm_from_bits(magnitude);
  if (magnitude >= 0x7f800000u) return tm_from_bits(TM_FLOAT_NAN);
  if (largest >= TM_SCALE_MIN || magnitude == 0) return largest;
  if (is_signed && largest * (tm_unit_top(1) / TM_SCALE_MIN) <= 0.5f) return 0.0f;
  return TM_SCALE_MIN;
}

/* y is at most the top unit and a rounding. Below the first normal unit the addition rounds to an
 * integer: there fp32 has spacing 1. */
TM_INLINE uint32_t tm_code(float y) {
  const uint32_t half = (1u << (TM_CODE_SHIFT - 1)) - 1;
  uint32_t bits = tm_bits(y);
  uint32_t normal = (bits + half + ((bits >> TM_CODE_SHIFT) & 1u) - TM_CODE_BIAS) >> TM_CODE_SHIFT;
  uint32_t small = tm_bits(y + 0x1p23f) - tm_bits(0x1p23f);
  return tm_select(y < (float)(1 << TM_CODE_MANTISSA), small, normal);
}

/* Returns the scale. */
TM_INLINE float tm_quantize_block(const float *restrict values, uint8_t *restrict codes, size_t n,
                                  int is_signed) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; i++) {
    uint32_t magnitude = tm_magnitude(values[i], is_signed);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = tm_block_scale(largest, is_signed);
  if (scale != scale) {
    memset(codes, 0, n);
    return scale;
  }
  const float factor = scale > 0.0f ? tm_unit_top(is_signed) / scale : 0.0f;
  for (size_t i = 0; i < n; i++) {
    uint32_t magnitude = tm_magnitude(values[i], is_signed);
    uint32_t code = tm_code(tm_from_bits(magnitude) * factor);
    if (is_signed)
      code |= (tm_bits(values[i]) >> 24) & 0x80u;
    else
      code |= (code == 0) & (magnitude != 0);
    codes[i] = (uint8_t)code;
  }
  return scale;
}

#endif
