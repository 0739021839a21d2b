/* The fp32 parameter that an update reads and writes, in each of its forms; form and grad_dtype are
 * constants where these are inlined. */
#ifndef TM_KERNELS_WEIGHTS_H
#define TM_KERNELS_WEIGHTS_H

#include "kernels_vector.h"

/* What a tm_weights is made of: master_form and param_dtype in one. */
typedef enum {
  TM_FP32,      /* param */
  TM_SPLIT,     /* hi in param, lo in master */
  TM_COPY_BF16, /* master, rounded to param */
  TM_COPY_FP16,
} tm_form;

/* 0 and the form; -EINVAL for dtypes that do not go together, and for NULL where n is not 0. */
int tm_weights_form(const tm_weights *weights, size_t n, tm_form *form);

/* The weights from element begin on. */
tm_weights tm_weights_from(const tm_weights *weights, tm_form form, size_t begin);

/* Loops work on a copy of the weights: stores to what they point to cannot change it, so that the
 * pointers stay in registers. */

/* ---- plain ------------------------------------------------------------------------------- */

TM_INLINE float tm_load_weight(const tm_weights *w, size_t i, tm_form form) {
  if (form == TM_FP32) return ((const float *)w->param)[i];
  if (form != TM_SPLIT) return ((const float *)w->master)[i];
  return tm_from_bits(tm_merge(((const uint16_t *)w->param)[i], ((const int16_t *)w->master)[i]));
}

TM_INLINE void tm_store_weight(const tm_weights *w, size_t i, tm_form form, float value) {
  if (form == TM_SPLIT) {
    tm_split(tm_bits(value), (uint16_t *)w->param + i, (int16_t *)w->master + i);
    return;
  }
  ((float *)(form == TM_FP32 ? w->param : w->master))[i] = value;
  if (form == TM_COPY_BF16) tm_store(w->param, i, TM_BFLOAT16, value);
  if (form == TM_COPY_FP16) tm_store(w->param, i, TM_FLOAT16, value);
}

#if TM_X86
/* Five streams at once are more than the hardware prefetchers follow well, and the long chain of
 * divisions keeps the window of pending loads short. Half a kilobyte ahead was the best of 256 to
 * 4096 bytes on Zen 4, by a quarter over none. An address past the end is never touched. */
enum { TM_AHEAD_BYTES = 512 };

TM_INLINE void tm_prefetch(const void *address) {
  __builtin_prefetch((const void *)((uintptr_t)address + TM_AHEAD_BYTES), 0, 3);
}

TM_INLINE void tm_prefetch_weights(const tm_weights *w, size_t i, tm_form form,
                                   uint32_t grad_dtype) {
  tm_prefetch((const char *)w->grad + i * tm_size(grad_dtype));
  tm_prefetch((const char *)w->param + i * (form == TM_FP32 ? sizeof(float) : sizeof(uint16_t)));
  if (form != TM_FP32)
    tm_prefetch((const char *)w->master + i * (form == TM_SPLIT ? sizeof(int16_t) : sizeof(float)));
}

/* ---- AVX2: 8 elements -------------------------------------------------------------------- */

TM_INLINE TM_TARGET_AVX2 __m256 tm_merge8(const uint16_t *hi, const int16_t *lo) {
  __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)hi));
  __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)lo));
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(high, 16), low));
}

TM_INLINE TM_TARGET_AVX2 void tm_split8(__m256 master, uint16_t *hi, int16_t *lo) {
  __m256i bits = _mm256_castps_si256(tm_one_nan8(master));
  __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
  _mm_storeu_si128((__m128i *)hi, tm_narrow8(high));
  _mm_storeu_si128((__m128i *)lo, tm_narrow8(bits));
}

TM_INLINE TM_TARGET_AVX2 __m256 tm_load_weight8(const tm_weights *w, size_t i, tm_form form) {
  if (form == TM_FP32) return _mm256_loadu_ps((const float *)w->param + i);
  if (form != TM_SPLIT) return _mm256_loadu_ps((const float *)w->master + i);
  return tm_merge8((const uint16_t *)w->param + i, (const int16_t *)w->master + i);
}

TM_INLINE TM_TARGET_AVX2 void tm_store_weight8(const tm_weights *w, size_t i, tm_form form,
                                               __m256 value) {
  if (form == TM_SPLIT) {
    tm_split8(value, (uint16_t *)w->param + i, (int16_t *)w->master + i);
    return;
  }
  _mm256_storeu_ps((float *)(form == TM_FP32 ? w->param : w->master) + i, value);
  if (form == TM_COPY_BF16) tm_store8(w->param, i, TM_BFLOAT16, value);
  if (form == TM_COPY_FP16) tm_store8(w->param, i, TM_FLOAT16, value);
}

/* ---- AVX-512: 16 elements ---------------------------------------------------------------- */

TM_INLINE TM_TARGET_AVX512 __m512 tm_merge16(const uint16_t *hi, const int16_t *lo) {
  __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)hi));
  __m512i low = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)lo));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 16), low));
}

TM_INLINE TM_TARGET_AVX512 void tm_split16(__m512 master, uint16_t *hi, int16_t *lo) {
  __m512i bits = _mm512_castps_si512(tm_one_nan16(master));
  __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
  _mm256_storeu_si256((__m256i *)hi, _mm512_cvtepi32_epi16(high));
  _mm256_storeu_si256((__m256i *)lo, _mm512_cvtepi32_epi16(bits));
}

TM_INLINE TM_TARGET_AVX512 __m512 tm_load_weight16(const tm_weights *w, size_t i, tm_form form) {
  if (form == TM_FP32) return _mm512_loadu_ps((const float *)w->param + i);
  if (form != TM_SPLIT) return _mm512_loadu_ps((const float *)w->master + i);
  return tm_merge16((const uint16_t *)w->param + i, (const int16_t *)w->master + i);
}

TM_INLINE TM_TARGET_AVX512 void tm_store_weight16(const tm_weights *w, size_t i, tm_form form,
                                                  __m512 value) {
  if (form == TM_SPLIT) {
    tm_split16(value, (uint16_t *)w->param + i, (int16_t *)w->master + i);
    return;
  }
  _mm512_storeu_ps((float *)(form == TM_FP32 ? w->param : w->master) + i, value);
  if (form == TM_COPY_BF16) tm_store16(w->param, i, TM_BFLOAT16, value);
  if (form == TM_COPY_FP16) tm_store16(w->param, i, TM_FLOAT16, value);
}
#endif

/* ---- all forms --------------------------------------------------------------------------- */

/* Calls loop(job, begin, end, form, grad_dtype). Each case repeats the call with constants, so that
 * the loop has no switch in it. */
#define TM_WEIGHTS_KIND(form, grad_dtype) ((form) * 3 + (grad_dtype))
#define TM_WEIGHTS_CASE(loop, form, grad_dtype)   \
  case TM_WEIGHTS_KIND(form, grad_dtype):         \
    loop(job, begin, end, form, grad_dtype);      \
    break;
#define TM_WEIGHTS_SWITCH(loop, form, grad_dtype)   \
  switch (TM_WEIGHTS_KIND(form, grad_dtype)) {      \
    TM_WEIGHTS_CASE(loop, TM_FP32, TM_FLOAT32)      \
    TM_WEIGHTS_CASE(loop, TM_SPLIT, TM_FLOAT32)     \
    TM_WEIGHTS_CASE(loop, TM_SPLIT, TM_BFLOAT16)    \
    TM_WEIGHTS_CASE(loop, TM_COPY_BF16, TM_FLOAT32)  \
    TM_WEIGHTS_CASE(loop, TM_COPY_BF16, TM_BFLOAT16) \
    TM_WEIGHTS_CASE(loop, TM_COPY_BF16, TM_FLOAT16)  \
    TM_WEIGHTS_CASE(loop, TM_COPY_FP16, TM_FLOAT32)  \
    TM_WEIGHTS_CASE(loop, TM_COPY_FP16, TM_BFLOAT16) \
    TM_WEIGHTS_CASE(loop, TM_COPY_FP16, TM_FLOAT16)  \
  }

#endif
