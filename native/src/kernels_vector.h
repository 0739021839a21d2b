/* Vectors of fp32 from and to arrays of every dtype; dtype is a constant where these are inlined. */
#ifndef TM_KERNELS_VECTOR_H
#define TM_KERNELS_VECTOR_H

#include "kernels.h"

#if TM_X86
#include <immintrin.h>

#define TM_TO_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

/* Elements base[i] to base[i + 7]. */
TM_INLINE TM_TARGET_AVX2 __m256 tm_load8(const void *base, size_t i, uint32_t dtype) {
  if (dtype == TM_FLOAT32) return _mm256_loadu_ps((const float *)base + i);
  __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)base + i));
  if (dtype == TM_FLOAT16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

TM_INLINE TM_TARGET_AVX2 __m256 tm_one_nan8(__m256 value) {
  __m256 one_nan = _mm256_castsi256_ps(_mm256_set1_epi32(TM_FLOAT_NAN));
  return _mm256_blendv_ps(value, one_nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

/* The low halves of 8 words, in order. */
TM_INLINE TM_TARGET_AVX2 __m128i tm_narrow8(__m256i words) {
  __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
  __m256i packed = _mm256_packus_epi32(low, low); /* per 128-bit half */
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

/* Returns what was stored. */
TM_INLINE TM_TARGET_AVX2 __m256 tm_store8(void *base, size_t i, uint32_t dtype, __m256 value) {
  __m128i half;
  if (dtype == TM_FLOAT32) {
    _mm256_storeu_ps((float *)base + i, value);
    return value;
  }
  value = tm_one_nan8(value);
  if (dtype == TM_FLOAT16) {
    half = _mm256_cvtps_ph(value, TM_TO_NEAREST);
    value = _mm256_cvtph_ps(half);
  } else {
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    bits = _mm256_srli_epi32(bits, 16);
    half = tm_narrow8(bits);
    value = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  _mm_storeu_si128((__m128i *)((uint16_t *)base + i), half);
  return value;
}

/* 8 elements of 16 bits as they are. */
TM_INLINE TM_TARGET_AVX2 void tm_copy8(void *to, const void *from, size_t i) {
  __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + i));
  _mm_storeu_si128((__m128i *)((uint16_t *)to + i), half);
}

/* Elements base[i] to base[i + 15]. */
TM_INLINE TM_TARGET_AVX512 __m512 tm_load16(const void *base, size_t i, uint32_t dtype) {
  if (dtype == TM_FLOAT32) return _mm512_loadu_ps((const float *)base + i);
  __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)base + i));
  if (dtype == TM_FLOAT16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

TM_INLINE TM_TARGET_AVX512 __m512 tm_one_nan16(__m512 value) {
  __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  __m512i one_nan = _mm512_set1_epi32(TM_FLOAT_NAN);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_castps_si512(value), nan, one_nan));
}

/* Returns what was stored. */
TM_INLINE TM_TARGET_AVX512 __m512 tm_store16(void *base, size_t i, uint32_t dtype, __m512 value) {
  __m256i half;
  if (dtype == TM_FLOAT32) {
    _mm512_storeu_ps((float *)base + i, value);
    return value;
  }
  value = tm_one_nan16(value);
  if (dtype == TM_FLOAT16) {
    half = _mm512_cvtps_ph(value, TM_TO_NEAREST);
    value = _mm512_cvtph_ps(half);
  } else {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    bits = _mm512_srli_epi32(bits, 16);
    half = _mm512_cvtepi32_epi16(bits);
    value = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }
  _mm256_storeu_si256((__m256i *)((uint16_t *)base + i), half);
  return value;
}

/* 16 elements of 16 bits as they are. */
TM_INLINE TM_TARGET_AVX512 void tm_copy16(void *to, const void *from, size_t i) {
  __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + i));
  _mm256_storeu_si256((__m256i *)((uint16_t *)to + i), half);
}
#endif

#endif
