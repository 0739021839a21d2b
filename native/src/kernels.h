/* What the kernel sources share; not part of the interface. */
#ifndef TM_KERNELS_H
#define TM_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tiermem.h"

#if defined(__x86_64__)
#define TM_X86 1
#define TM_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define TM_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#else
#define TM_X86 0
#endif

/* Scalar code that must be inlined into every variant: there fmaf becomes one instruction. */
#define TM_INLINE static inline __attribute__((always_inline))

/* [Note: same bits from every variant]
 * A variant is a vector loop over whole vectors and the scalar code for the rest. Both consist of
 * single IEEE operations (add, multiply, divide, square root, fused multiply-add, conversions) in
 * the same order per element, and nothing is contracted (-ffp-contract=off), so the bits depend
 * neither on the variant nor on where an array was cut. The only freedom left is which of two
 * different NaN operands survives: the payload of a NaN is not specified.
 */

/* Elements handed to a thread at a time: small enough to balance two uneven cores, large enough
 * that the counter costs nothing and that each stream runs over many pages. */
enum { TM_CHUNK = 65536 };

/* Works on elements [begin, end) of the job. */
typedef void (*tm_range_fn)(void *context, size_t begin, size_t end);

/* Calls function over [0, n) in pieces of chunk elements, on the pool's threads and the caller's;
 * returns when all are done. pool may be NULL. The pieces run with the default floating-point
 * environment whatever the caller's is. */
void tm_pool_run(tm_pool *pool, size_t n, size_t chunk, tm_range_fn function, void *context);

/* 0, -EINVAL for a number that is no variant, -ENOTSUP for one that this machine cannot run. */
int tm_isa_check(uint32_t isa);

TM_INLINE uint32_t tm_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

TM_INLINE float tm_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

TM_INLINE float tm_from_bf16(uint16_t value) { return tm_from_bits((uint32_t)value << 16); }

/* Codes of fp16 below 0x400 count units of 2^-24; the others differ from fp32 in the bias. */
TM_INLINE float tm_from_fp16(uint16_t value) {
  uint32_t sign = (uint32_t)(value & 0x8000u) << 16, code = value & 0x7fffu;
  uint32_t normal = (code << 13) + (code >= 0x7c00u ? 0x70000000u : 0x38000000u);
  uint32_t small = tm_bits((float)(int32_t)code * 0x1p-24f);
  return tm_from_bits(sign | (code < 0x400u ? small : normal));
}

TM_INLINE int tm_is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

/* [Note: NaN in a split master]
 * Rounding is an integer addition, and the carry may run through the exponent into the sign. For
 * finite values and infinities that is right: the largest finite masters get hi = inf with a
 * negative remainder, which adds up to the exact master again. For a NaN it is not: 0x7fffffff
 * would become hi = 0x8000, and the model would compute with -0.0. So every NaN is written as the
 * one NaN (hi = TM_BF16_NAN, lo = 0). No other pair that a split writes adds up to a NaN, and with
 * a NaN in hi every remainder adds up to a NaN, so it can neither appear nor vanish.
 */
#define TM_BF16_NAN 0x7fc0u
#define TM_FP16_NAN 0x7e00u
#define TM_FLOAT_NAN 0x7fc00000u

TM_INLINE uint32_t tm_merge(uint16_t hi, int16_t lo) {
  return ((uint32_t)hi << 16) + (uint32_t)(int32_t)lo;
}

TM_INLINE void tm_split(uint32_t bits, uint16_t *hi, int16_t *lo) {
  bits = tm_is_nan(bits) ? TM_FLOAT_NAN : bits;
  *hi = (uint16_t)((bits + 0x8000u) >> 16);
  *lo = (int16_t)(uint16_t)bits; /* bits - (hi << 16) fits 16 bits: its low half is that of bits */
}

/* To nearest even; every NaN becomes the one NaN, as in a split master. */
TM_INLINE uint16_t tm_round_to_bf16(float value) {
  uint32_t bits = tm_bits(value);
  uint16_t rounded = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  return tm_is_nan(bits) ? TM_BF16_NAN : rounded;
}

/* Below 2^-14 the codes are multiples of 2^-24, which is the spacing of fp32 at 0.5: the addition
 * rounds. From 2^16 on everything is infinite; what lies between 65504 and that is rounded there by
 * the carry. */
TM_INLINE uint16_t tm_round_to_fp16(float value) {
  uint32_t bits = tm_bits(value), magnitude = bits & 0x7fffffffu;
  uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  uint32_t small = tm_bits(tm_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t code = magnitude < 0x38800000u ? small : magnitude < 0x47800000u ? normal : 0x7c00u;
  code |= (bits >> 16) & 0x8000u;
  return (uint16_t)(tm_is_nan(bits) ? TM_FP16_NAN : code);
}

TM_INLINE size_t tm_size(uint32_t dtype) {
  return dtype == TM_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
}

TM_INLINE float tm_load(const void *base, size_t i, uint32_t dtype) {
  if (dtype == TM_FLOAT32) return ((const float *)base)[i];
  uint16_t half = ((const uint16_t *)base)[i];
  return dtype == TM_BFLOAT16 ? tm_from_bf16(half) : tm_from_fp16(half);
}

/* Returns what was stored. */
TM_INLINE float tm_store(void *base, size_t i, uint32_t dtype, float value) {
  uint16_t half;
  switch (dtype) {
    case TM_FLOAT32: return ((float *)base)[i] = value;
    case TM_BFLOAT16: half = ((uint16_t *)base)[i] = tm_round_to_bf16(value); break;
    default: half = ((uint16_t *)base)[i] = tm_round_to_fp16(value); break;
  }
  return dtype == TM_BFLOAT16 ? tm_from_bf16(half) : tm_from_fp16(half);
}

#endif
