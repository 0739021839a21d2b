/* Values to 8-bit codes and back (see [Note: 8-bit codes]). */
#include <errno.h>

#include "kernels_codes.h"

typedef struct {
  const float *values;
  float *out;
  const uint8_t *codes;
  uint8_t *out_codes;
  const float *scales;
  float *out_scales;
  int is_signed;
} tm_codes_job;

/* Single operations without a choice of order, so what the compiler makes of these loops for each
 * target has the same bits. A range begins at a block. */

TM_INLINE void tm_quantize_blocks(const tm_codes_job *job, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i += TM_QUANT_BLOCK) {
    size_t n = end - i < TM_QUANT_BLOCK ? end - i : TM_QUANT_BLOCK;
    float *scale = &job->out_scales[i / TM_QUANT_BLOCK];
    if (job->is_signed)
      *scale = tm_quantize_block(job->values + i, job->out_codes + i, n, 1);
    else
      *scale = tm_quantize_block(job->values + i, job->out_codes + i, n, 0);
  }
}

TM_INLINE void tm_dequantize_blocks(const tm_codes_job *job, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i += TM_QUANT_BLOCK) {
    size_t n = end - i < TM_QUANT_BLOCK ? end - i : TM_QUANT_BLOCK;
    float scale = job->scales[i / TM_QUANT_BLOCK];
    if (job->is_signed)
      tm_dequantize_block(job->codes + i, scale, job->out + i, n, 1);
    else
      tm_dequantize_block(job->codes + i, scale, job->out + i, n, 0);
  }
}

static void tm_quantize_plain(void *context, size_t begin, size_t end) {
  tm_quantize_blocks(context, begin, end);
}

static void tm_dequantize_plain(void *context, size_t begin, size_t end) {
  tm_dequantize_blocks(context, begin, end);
}

#if TM_X86
TM_TARGET_AVX2 static void tm_quantize_avx2(void *context, size_t begin, size_t end) {
  tm_quantize_blocks(context, begin, end);
}

TM_TARGET_AVX2 static void tm_dequantize_avx2(void *context, size_t begin, size_t end) {
  tm_dequantize_blocks(context, begin, end);
}

TM_TARGET_AVX512 static void tm_quantize_avx512(void *context, size_t begin, size_t end) {
  tm_quantize_blocks(context, begin, end);
}

TM_TARGET_AVX512 static void tm_dequantize_avx512(void *context, size_t begin, size_t end) {
  tm_dequantize_blocks(context, begin, end);
}
#endif

int tm_quantize(tm_pool *pool, uint32_t isa, size_t n, uint32_t is_signed, const float *values,
                uint8_t *codes, float *scales) {
  tm_codes_job job = {
      .values = values, .out_codes = codes, .out_scales = scales, .is_signed = is_signed != 0};
  tm_range_fn range = tm_quantize_plain;
  int error = tm_isa_check(isa);
  if (error != 0) return error;
  if (n != 0 && (values == NULL || codes == NULL || scales == NULL)) return -EINVAL;
#if TM_X86
  if (isa == TM_ISA_AVX2) range = tm_quantize_avx2;
  if (isa == TM_ISA_AVX512) range = tm_quantize_avx512;
#endif
  tm_pool_run(pool, n, TM_CHUNK, range, &job);
  return 0;
}

int tm_dequantize(tm_pool *pool, uint32_t isa, size_t n, uint32_t is_signed, const uint8_t *codes,
                  const float *scales, float *values) {
  tm_codes_job job = {
      .codes = codes, .scales = scales, .out = values, .is_signed = is_signed != 0};
  tm_range_fn range = tm_dequantize_plain;
  int error = tm_isa_check(isa);
  if (error != 0) return error;
  if (n != 0 && (values == NULL || codes == NULL || scales == NULL)) return -EINVAL;
#if TM_X86
  if (isa == TM_ISA_AVX2) range = tm_dequantize_avx2;
  if (isa == TM_ISA_AVX512) range = tm_dequantize_avx512;
#endif
  tm_pool_run(pool, n, TM_CHUNK, range, &job);
  return 0;
}
