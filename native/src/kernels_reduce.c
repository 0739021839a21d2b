/* Sums of several arrays with conversion, and the sum of squares in the canonical order. */
#include <errno.h>

#include "kernels_vector.h"

enum { TM_LANES = 16 };

/* Partial sums kept at a time: bounds the scratch, and a pass still covers 2^26 elements. */
enum { TM_WINDOW_BLOCKS = 1024 };

typedef enum {
  TM_SET,
  TM_ADD,
  TM_COPY, /* 16 bits to the same 16 bits: rounding would cost twice the time and change nothing */
} tm_mode;

typedef struct {
  const tm_reduction *reduction;
  tm_mode mode;
  uint32_t isa;
  size_t offset;      /* of the window; a multiple of TM_NORM_BLOCK */
  double *block_sums; /* one per block of the window; always written */
} tm_reduce_job;

/* [Note: reduction in groups]
 * A group is a few vectors of neighbouring elements. All parts are read and summed in registers
 * before the group is written, so memory is passed over once and a part may be the destination.
 * Groups begin at multiples of TM_LANES from the start of the array. The square of an fp32 value is
 * exact in fp64, so that fused or not the sum of squares is the same.
 */

/* ---- plain -------------------------------------------------------------------------------- */

TM_INLINE void tm_reduce_group(const tm_reduction *r, size_t i, uint32_t to, uint32_t from,
                               tm_mode mode, double lanes[TM_LANES]) {
  float sum[TM_LANES];
  for (size_t j = 0; j < TM_LANES; j++) sum[j] = tm_load(r->parts[0], i + j, from);
  for (uint32_t k = 1; k < r->num_parts; k++) {
    const void *part = r->parts[k];
    for (size_t j = 0; j < TM_LANES; j++) sum[j] = sum[j] + tm_load(part, i + j, from);
  }
  for (size_t j = 0; j < TM_LANES; j++) {
    float value = sum[j] * r->scale;
    if (mode == TM_ADD) value = tm_load(r->destination, i + j, to) + value;
    if (mode == TM_COPY)
      ((uint16_t *)r->destination)[i + j] = ((const uint16_t *)r->parts[0])[i + j];
    else
      value = tm_store(r->destination, i + j, to, value);
    lanes[j] += (double)value * (double)value;
  }
}

/* Fewer than TM_LANES elements, once per block: not worth code for every combination of dtypes. */
static void tm_reduce_tail(const tm_reduction *r, tm_mode mode, size_t begin, size_t end,
                           double lanes[TM_LANES]) {
  for (size_t i = begin; i < end; i++) {
    float value = tm_load(r->parts[0], i, r->part_dtype);
    for (uint32_t k = 1; k < r->num_parts; k++) value = value + tm_load(r->parts[k], i, r->part_dtype);
    value = value * r->scale;
    if (mode == TM_ADD) value = tm_load(r->destination, i, r->destination_dtype) + value;
    if (mode == TM_COPY)
      ((uint16_t *)r->destination)[i] = ((const uint16_t *)r->parts[0])[i];
    else
      value = tm_store(r->destination, i, r->destination_dtype, value);
    lanes[i - begin] += (double)value * (double)value;
  }
}

TM_INLINE void tm_reduce_loop(const tm_reduction *r, size_t begin, size_t end, uint32_t to,
                              uint32_t from, tm_mode mode, double lanes[TM_LANES]) {
  size_t i = begin;
  for (; end - i >= TM_LANES; i += TM_LANES) tm_reduce_group(r, i, to, from, mode, lanes);
  tm_reduce_tail(r, mode, i, end, lanes);
}

#if TM_X86
/* ---- AVX2: width vectors of 8 elements, two for all lanes --------------------------------- */

TM_INLINE TM_TARGET_AVX2 void tm_reduce_group8(const tm_reduction *r, size_t i, int width,
                                               uint32_t to, uint32_t from, tm_mode mode,
                                               __m256d lanes[4]) {
  const __m256 scale = _mm256_set1_ps(r->scale);
  __m256 sum[4];
  for (int w = 0; w < width; w++) sum[w] = tm_load8(r->parts[0], i + 8 * w, from);
  for (uint32_t k = 1; k < r->num_parts; k++) {
    const void *part = r->parts[k];
    for (int w = 0; w < width; w++)
      sum[w] = _mm256_add_ps(sum[w], tm_load8(part, i + 8 * w, from));
  }
  for (int w = 0; w < width; w++) {
    __m256 value = _mm256_mul_ps(sum[w], scale);
    if (mode == TM_ADD) value = _mm256_add_ps(tm_load8(r->destination, i + 8 * w, to), value);
    if (mode == TM_COPY)
      tm_copy8(r->destination, r->parts[0], i + 8 * w);
    else
      value = tm_store8(r->destination, i + 8 * w, to, value);
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
    __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
    lanes[w % 2 * 2] = _mm256_fmadd_pd(low, low, lanes[w % 2 * 2]);
    lanes[w % 2 * 2 + 1] = _mm256_fmadd_pd(high, high, lanes[w % 2 * 2 + 1]);
  }
}

TM_INLINE TM_TARGET_AVX2 void tm_reduce_loop8(const tm_reduction *r, size_t begin, size_t end,
                                              uint32_t to, uint32_t from, tm_mode mode,
                                              double lanes[TM_LANES]) {
  __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                     _mm256_setzero_pd()};
  size_t i = begin;
  for (; end - i >= 32; i += 32) tm_reduce_group8(r, i, 4, to, from, mode, sums);
  for (; end - i >= 16; i += 16) tm_reduce_group8(r, i, 2, to, from, mode, sums);
  for (int k = 0; k < 4; k++) _mm256_storeu_pd(lanes + 4 * k, sums[k]);
  tm_reduce_tail(r, mode, i, end, lanes);
}

/* ---- AVX-512: width vectors of 16 elements ------------------------------------------------ */

TM_INLINE TM_TARGET_AVX512 void tm_reduce_group16(const tm_reduction *r, size_t i, int width,
                                                  uint32_t to, uint32_t from, tm_mode mode,
                                                  __m512d lanes[2]) {
  const __m512 scale = _mm512_set1_ps(r->scale);
  __m512 sum[4];
  for (int w = 0; w < width; w++) sum[w] = tm_load16(r->parts[0], i + 16 * w, from);
  for (uint32_t k = 1; k < r->num_parts; k++) {
    const void *part = r->parts[k];
    for (int w = 0; w < width; w++)
      sum[w] = _mm512_add_ps(sum[w], tm_load16(part, i + 16 * w, from));
  }
  for (int w = 0; w < width; w++) {
    __m512 value = _mm512_mul_ps(sum[w], scale);
    if (mode == TM_ADD) value = _mm512_add_ps(tm_load16(r->destination, i + 16 * w, to), value);
    if (mode == TM_COPY)
      tm_copy16(r->destination, r->parts[0], i + 16 * w);
    else
      value = tm_store16(r->destination, i + 16 * w, to, value);
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
    __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
    lanes[0] = _mm512_fmadd_pd(low, low, lanes[0]);
    lanes[1] = _mm512_fmadd_pd(high, high, lanes[1]);
  }
}

TM_INLINE TM_TARGET_AVX512 void tm_reduce_loop16(const tm_reduction *r, size_t begin, size_t end,
                                                 uint32_t to, uint32_t from, tm_mode mode,
                                                 double lanes[TM_LANES]) {
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  size_t i = begin;
  for (; end - i >= 64; i += 64) tm_reduce_group16(r, i, 4, to, from, mode, sums);
  for (; end - i >= 16; i += 16) tm_reduce_group16(r, i, 1, to, from, mode, sums);
  _mm512_storeu_pd(lanes, sums[0]);
  _mm512_storeu_pd(lanes + 8, sums[1]);
  tm_reduce_tail(r, mode, i, end, lanes);
}
#endif

/* ---- one block, all combinations of dtypes ------------------------------------------------ */

typedef void (*tm_block_fn)(const tm_reduction *r, tm_mode mode, size_t begin, size_t end,
                            double lanes[TM_LANES]);

/* Each case repeats the call with constants, so that the loop has no switch in it. */
#define TM_COMBINATION(to, from, mode) (((to) * 3 + (from)) * 3 + (mode))
#define TM_CASE(loop, to, from, constant)          \
  case TM_COMBINATION(to, from, constant):         \
    loop(r, begin, end, to, from, constant, lanes); \
    break;
#define TM_CASES(loop, to, from) TM_CASE(loop, to, from, TM_SET) TM_CASE(loop, to, from, TM_ADD)
#define TM_CASES_OF_DESTINATION(loop, to) \
  TM_CASES(loop, to, TM_FLOAT32)          \
  TM_CASES(loop, to, TM_BFLOAT16)         \
  TM_CASES(loop, to, TM_FLOAT16)
#define TM_SWITCH(loop)                                              \
  switch (TM_COMBINATION(r->destination_dtype, r->part_dtype, mode)) { \
    TM_CASES_OF_DESTINATION(loop, TM_FLOAT32)                        \
    TM_CASES_OF_DESTINATION(loop, TM_BFLOAT16)                       \
    TM_CASES_OF_DESTINATION(loop, TM_FLOAT16)                        \
    TM_CASE(loop, TM_BFLOAT16, TM_BFLOAT16, TM_COPY)                 \
    TM_CASE(loop, TM_FLOAT16, TM_FLOAT16, TM_COPY)                   \
  }

static void tm_block_plain(const tm_reduction *r, tm_mode mode, size_t begin, size_t end,
                           double lanes[TM_LANES]) {
  TM_SWITCH(tm_reduce_loop)
}

#if TM_X86
TM_TARGET_AVX2 static void tm_block_avx2(const tm_reduction *r, tm_mode mode, size_t begin,
                                         size_t end, double lanes[TM_LANES]) {
  TM_SWITCH(tm_reduce_loop8)
}

TM_TARGET_AVX512 static void tm_block_avx512(const tm_reduction *r, tm_mode mode, size_t begin,
                                             size_t end, double lanes[TM_LANES]) {
  TM_SWITCH(tm_reduce_loop16)
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

static void tm_reduce_range(void *context, size_t begin, size_t end) {
  const tm_reduce_job *job = context;
  double lanes[TM_LANES] = {0};

  tm_block_of(job->isa)(job->reduction, job->mode, job->offset + begin, job->offset + end, lanes);
  for (int half = TM_LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  job->block_sums[begin / TM_NORM_BLOCK] = lanes[0];
}

static int tm_reduce_check(const tm_reduction *r, size_t n) {
  if (r == NULL || r->parts == NULL || r->num_parts == 0 || r->num_parts > TM_MAX_PARTS)
    return -EINVAL;
  if (r->destination_dtype > TM_FLOAT16 || r->part_dtype > TM_FLOAT16) return -EINVAL;
  if (n == 0) return 0;
  if (r->destination == NULL) return -EINVAL;
  for (uint32_t k = 0; k < r->num_parts; k++)
    if (r->parts[k] == NULL) return -EINVAL;
  return 0;
}

static tm_mode tm_mode_of(const tm_reduction *r) {
  if (r->add) return TM_ADD;
  if (r->num_parts == 1 && r->scale == 1.0f && r->part_dtype == r->destination_dtype &&
      r->part_dtype != TM_FLOAT32)
    return TM_COPY;
  return TM_SET;
}

int tm_reduce(tm_pool *pool, uint32_t isa, size_t n, const tm_reduction *reduction,
              double *sum_squares) {
  double block_sums[TM_WINDOW_BLOCKS];
  const size_t window = (size_t)TM_WINDOW_BLOCKS * TM_NORM_BLOCK;
  tm_reduce_job job = {.reduction = reduction, .isa = isa, .block_sums = block_sums};
  double total = 0.0;

  int error = tm_isa_check(isa);
  if (error == 0) error = tm_reduce_check(reduction, n);
  if (error != 0) return error;

  job.mode = tm_mode_of(reduction);
  for (; job.offset < n; job.offset += window) {
    size_t count = n - job.offset < window ? n - job.offset : window;
    tm_pool_run(pool, count, TM_NORM_BLOCK, tm_reduce_range, &job);
    for (size_t block = 0; block * TM_NORM_BLOCK < count; block++) total += block_sums[block];
  }
  if (sum_squares != NULL) *sum_squares = total;
  return 0;
}
