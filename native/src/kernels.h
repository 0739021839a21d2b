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
#define TM_TARGET_AVX2 __attribute__((target("avx2,fma")))
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
#define TM_FLOAT_NAN 0x7fc00000u

TM_INLINE uint32_t tm_merge(uint16_t hi, int16_t lo) {
  return ((uint32_t)hi << 16) + (uint32_t)(int32_t)lo;
}

TM_INLINE void tm_split(uint32_t bits, uint16_t *hi, int16_t *lo) {
  bits = tm_is_nan(bits) ? TM_FLOAT_NAN : bits;
  *hi = (uint16_t)((bits + 0x8000u) >> 16);
  *lo = (int16_t)(uint16_t)bits; /* bits - (hi << 16) fits 16 bits: its low half is that of bits */
}

#endif
