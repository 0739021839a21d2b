/* Gradient accumulation and conversion with the sum of squares in the canonical order. */
#include <errno.h>

#include "kernels.h"

#if TM_X86
#include <immintrin.h>
#endif

enum { TM_LANES = 16 };

/* Partial sums kept at a time: bounds the scratch, and a pass still covers 2^26 elements. */
enum { TM_WINDOW_BLOCKS = 1024 };

typedef enum {
  TM_FP32_ADD_FP32,
  TM_FP32_ADD_BF16,
  TM_FP32_SET_FP32,
  TM_FP32_SET_BF16,
  TM_BF16_SET_FP32,
  TM_BF16_SET_BF16,
} tm_combination;

typedef struct {
  void *destination;
  const void *source;
  tm_combination combination;
  uint32_t isa;
  double *block_sums; /* one per block of the job; always written */
} tm_accumulate_job;

TM_INLINE uint16_t tm_round_to_bf16(float value) {
  uint32_t bits = tm_bits(value);
  if (tm_is_nan(bits)) return TM_BF16_NAN;
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* ---- plain: also the end of every block of the other variants ----------------------------- */

/* begin is a multiple of TM_LANES. The square of an fp32 value is exact in fp64, so that fused or
 * not the sum is the same. */
TM_INLINE void tm_accumulate_scalar(void *destination, const void *source, size_t begin, size_t end,
                                    tm_combination combination, double lanes[TM_LANES]) {
  float *to = destination;
  uint16_t *to_bf16 = destination;
  const float *from = source;
  const uint16_t *from_bf16 = source;
  for (size_t i = begin; i < end; i++) {
    float value;
    switch (combination) {
      case TM_FP32_ADD_FP32: value = to[i] = to[i] + from[i]; break;
      case TM_FP32_ADD_BF16: value = to[i] = to[i] + tm_from_bf16(from_bf16[i]); break;
      case TM_FP32_SET_FP32: value = to[i] = from[i]; break;
      case TM_FP32_SET_BF16: value = to[i] = tm_from_bf16(from_bf16[i]); break;
      case TM_BF16_SET_FP32: value = tm_from_bf16(to_bf16[i] = tm_round_to_bf16(from[i])); break;
      default: value = tm_from_bf16(to_bf16[i] = from_bf16[i]); break;
    }
    lanes[i % TM_LANES] += (double)value * (double)value;
  }
}

#if TM_X86
/* ---- AVX2: 8 elements, half of the lanes ------------------------------------------------- */

TM_INLINE TM_TARGET_AVX2 __m256 tm_widen8(__m128i bf16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
}

TM_INLINE TM_TARGET_AVX2 __m128i tm_round8(__m256 value) {
  __m256i bits = _mm256_castps_si256(value);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  __m256i high = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(TM_BF16_NAN), nan);
  __m256i packed = _mm256_packus_epi32(high, high);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

TM_INLINE TM_TARGET_AVX2 __m256 tm_combine8(void *destination, const void *source, size_t i,
                                            tm_combination combination) {
  float *to = (float *)destination + i;
  __m128i *to_bf16 = (__m128i *)((uint16_t *)destination + i);
  const float *from = (const float *)source + i;
  const __m128i *from_bf16 = (const __m128i *)((const uint16_t *)source + i);
  __m128i bf16;
  __m256 value;
  switch (combination) {
    case TM_FP32_ADD_FP32: value = _mm256_add_ps(_mm256_loadu_ps(to), _mm256_loadu_ps(from)); break;
    case TM_FP32_ADD_BF16:
      value = _mm256_add_ps(_mm256_loadu_ps(to), tm_widen8(_mm_loadu_si128(from_bf16)));
      break;
    case TM_FP32_SET_FP32: value = _mm256_loadu_ps(from); break;
    case TM_FP32_SET_BF16: value = tm_widen8(_mm_loadu_si128(from_bf16)); break;
    default:
      bf16 = combination == TM_BF16_SET_FP32 ? tm_round8(_mm256_loadu_ps(from))
                                             : _mm_loadu_si128(from_bf16);
      _mm_storeu_si128(to_bf16, bf16);
      return tm_widen8(bf16);
  }
  _mm256_storeu_ps(to, value);
  return value;
}

TM_INLINE TM_TARGET_AVX2 void tm_square8(__m256 value, __m256d *low, __m256d *high) {
  __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
  __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
  *low = _mm256_fmadd_pd(a, a, *low);
  *high = _mm256_fmadd_pd(b, b, *high);
}

TM_INLINE TM_TARGET_AVX2 void tm_accumulate_loop8(void *destination, const void *source, size_t n,
                                                  tm_combination combination,
                                                  double lanes[TM_LANES]) {
  __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                     _mm256_setzero_pd()};
  size_t i = 0;
  for (; n - i >= TM_LANES; i += TM_LANES) {
    tm_square8(tm_combine8(destination, source, i, combination), &sums[0], &sums[1]);
    tm_square8(tm_combine8(destination, source, i + 8, combination), &sums[2], &sums[3]);
  }
  for (int k = 0; k < 4; k++) _mm256_storeu_pd(lanes + 4 * k, sums[k]);
  tm_accumulate_scalar(destination, source, i, n, combination, lanes);
}

/* ---- AVX-512: 16 elements ---------------------------------------------------------------- */

TM_INLINE TM_TARGET_AVX512 __m512 tm_widen16(__m256i bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

TM_INLINE TM_TARGET_AVX512 __m256i tm_round16(__m512 value) {
  __m512i bits = _mm512_castps_si512(value);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(TM_BF16_NAN)));
}

TM_INLINE TM_TARGET_AVX512 __m512 tm_combine16(void *destination, const void *source, size_t i,
                                               tm_combination combination) {
  float *to = (float *)destination + i;
  __m256i *to_bf16 = (__m256i *)((uint16_t *)destination + i);
  const float *from = (const float *)source + i;
  const __m256i *from_bf16 = (const __m256i *)((const uint16_t *)source + i);
  __m256i bf16;
  __m512 value;
  switch (combination) {
    case TM_FP32_ADD_FP32: value = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(from)); break;
    case TM_FP32_ADD_BF16:
      value = _mm512_add_ps(_mm512_loadu_ps(to), tm_widen16(_mm256_loadu_si256(from_bf16)));
      break;
    case TM_FP32_SET_FP32: value = _mm512_loadu_ps(from); break;
    case TM_FP32_SET_BF16: value = tm_widen16(_mm256_loadu_si256(from_bf16)); break;
    default:
      bf16 = combination == TM_BF16_SET_FP32 ? tm_round16(_mm512_loadu_ps(from))
                                             : _mm256_loadu_si256(from_bf16);
      _mm256_storeu_si256(to_bf16, bf16);
      return tm_widen16(bf16);
  }
  _mm512_storeu_ps(to, value);
  return value;
}

TM_INLINE TM_TARGET_AVX512 void tm_accumulate_loop16(void *destination, const void *source, size_t n,
                                                     tm_combination combination,
                                                     double lanes[TM_LANES]) {
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  size_t i = 0;
  for (; n - i >= TM_LANES; i += TM_LANES) {
    __m512 value = tm_combine16(destination, source, i, combination);
    __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    __m512d b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
    low = _mm512_fmadd_pd(a, a, low);
    high = _mm512_fmadd_pd(b, b, high);
  }
  _mm512_storeu_pd(lanes, low);
  _mm512_storeu_pd(lanes + 8, high);
  tm_accumulate_scalar(destination, source, i, n, combination, lanes);
}
#endif

/* ---- one block, all combinations --------------------------------------------------------- */

typedef void (*tm_block_fn)(void *destination, const void *source, size_t n,
                            tm_combination combination, double lanes[TM_LANES]);

/* Each case repeats the call with a constant, so that the loop has no switch in it. */
#define TM_FOR_EACH_COMBINATION(CALL)                  \
  switch (combination) {                               \
    case TM_FP32_ADD_FP32: CALL(TM_FP32_ADD_FP32); break; \
    case TM_FP32_ADD_BF16: CALL(TM_FP32_ADD_BF16); break; \
    case TM_FP32_SET_FP32: CALL(TM_FP32_SET_FP32); break; \
    case TM_FP32_SET_BF16: CALL(TM_FP32_SET_BF16); break; \
    case TM_BF16_SET_FP32: CALL(TM_BF16_SET_FP32); break; \
    case TM_BF16_SET_BF16: CALL(TM_BF16_SET_BF16); break; \
  }

static void tm_block_plain(void *destination, const void *source, size_t n,
                           tm_combination combination, double lanes[TM_LANES]) {
#define TM_CALL(constant) tm_accumulate_scalar(destination, source, 0, n, constant, lanes)
  TM_FOR_EACH_COMBINATION(TM_CALL)
#undef TM_CALL
}

#if TM_X86
TM_TARGET_AVX2 static void tm_block_avx2(void *destination, const void *source, size_t n,
                                         tm_combination combination, double lanes[TM_LANES]) {
#define TM_CALL(constant) tm_accumulate_loop8(destination, source, n, constant, lanes)
  TM_FOR_EACH_COMBINATION(TM_CALL)
#undef TM_CALL
}

TM_TARGET_AVX512 static void tm_block_avx512(void *destination, const void *source, size_t n,
                                             tm_combination combination, double lanes[TM_LANES]) {
#define TM_CALL(constant) tm_accumulate_loop16(destination, source, n, constant, lanes)
  TM_FOR_EACH_COMBINATION(TM_CALL)
#undef TM_CALL
}
#endif

static tm_block_fn tm_block_of(uint32_t isa) {
#if TM_X86
  if (isa == TM_ISA_AVX512) return tm_block_avx512;
  if (isa == TM_ISA_AVX2) return tm_block_avx2;
#endif
  return tm_block_plain;
}

/* ---- interface --------------------------------------------------------------------------- */

static void tm_accumulate_range(void *context, size_t begin, size_t end) {
  const tm_accumulate_job *job = context;
  tm_combination combination = job->combination;
  size_t to_size = combination >= TM_BF16_SET_FP32 ? sizeof(uint16_t) : sizeof(float);
  size_t from_size = combination % 2 ? sizeof(uint16_t) : sizeof(float);
  double lanes[TM_LANES] = {0};

  tm_block_of(job->isa)((char *)job->destination + begin * to_size,
                        (const char *)job->source + begin * from_size, end - begin, combination,
                        lanes);
  for (int half = TM_LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  job->block_sums[begin / TM_NORM_BLOCK] = lanes[0];
}

static int tm_combination_of(uint32_t destination, uint32_t source, uint32_t add,
                             tm_combination *out) {
  if (destination > TM_BFLOAT16 || source > TM_BFLOAT16) return -EINVAL;
  /* Adding up in bf16 loses most of what is added. */
  if (destination == TM_BFLOAT16 && add) return -EINVAL;
  *out = (tm_combination)((destination == TM_BFLOAT16 ? TM_BF16_SET_FP32
                           : add                      ? TM_FP32_ADD_FP32
                                                      : TM_FP32_SET_FP32) +
                          (source == TM_BFLOAT16 ? 1 : 0));
  return 0;
}

int tm_accumulate(tm_pool *pool, uint32_t isa, size_t n, void *destination,
                  uint32_t destination_dtype, const void *source, uint32_t source_dtype,
                  uint32_t add, double *sum_squares) {
  double block_sums[TM_WINDOW_BLOCKS];
  const size_t window = (size_t)TM_WINDOW_BLOCKS * TM_NORM_BLOCK;
  size_t to_size = destination_dtype == TM_BFLOAT16 ? sizeof(uint16_t) : sizeof(float);
  size_t from_size = source_dtype == TM_BFLOAT16 ? sizeof(uint16_t) : sizeof(float);
  tm_accumulate_job job = {.isa = isa, .block_sums = block_sums};
  double total = 0.0;

  int error = tm_isa_check(isa);
  if (error == 0)
    error = tm_combination_of(destination_dtype, source_dtype, add, &job.combination);
  if (error == 0 && n != 0 && (destination == NULL || source == NULL)) error = -EINVAL;
  if (error != 0) return error;

  for (size_t begin = 0; begin < n; begin += window) {
    size_t count = n - begin < window ? n - begin : window;
    job.destination = (char *)destination + begin * to_size;
    job.source = (const char *)source + begin * from_size;
    tm_pool_run(pool, count, TM_NORM_BLOCK, tm_accumulate_range, &job);
    for (size_t block = 0; block * TM_NORM_BLOCK < count; block++) total += block_sums[block];
  }
  if (sum_squares != NULL) *sum_squares = total;
  return 0;
}
