/* Adam and AdamW with moments in 8-bit codes, on weights of every form. */
#include <errno.h>

#include "kernels_adamw.h"
#include "kernels_codes.h"

typedef struct {
  tm_adamw_terms terms;
  tm_form form;
  tm_weights weights;
  tm_moments_8bit moments;
  tm_codec codec;
  tm_range_fn update; /* Adam with fp32 moments, of the same variant */
} tm_adamw_8bit_job;

/* Block by block: both moments to fp32 on the stack, the update with fp32 moments, and back to codes.
 * The parameter sees the new moments before they are rounded. */
static void tm_adamw_8bit_block(const tm_adamw_8bit_job *job, size_t begin, size_t n) {
  const tm_moments_8bit *m = &job->moments;
  const size_t block = begin / TM_QUANT_BLOCK;
  float exp_avg[TM_QUANT_BLOCK], exp_avg_sq[TM_QUANT_BLOCK];
  tm_adamw_job update = {.terms = job->terms,
                         .form = job->form,
                         .weights = tm_weights_from(&job->weights, job->form, begin),
                         .exp_avg = exp_avg,
                         .exp_avg_sq = exp_avg_sq};

  job->codec.dequantize(m->exp_avg + begin, m->exp_avg_scale[block], exp_avg, n, 1);
  job->codec.dequantize(m->exp_avg_sq + begin, m->exp_avg_sq_scale[block], exp_avg_sq, n, 0);
  job->update(&update, 0, n);
  m->exp_avg_scale[block] = job->codec.quantize(exp_avg, m->exp_avg + begin, n, 1);
  m->exp_avg_sq_scale[block] = job->codec.quantize(exp_avg_sq, m->exp_avg_sq + begin, n, 0);
}

/* A range begins at a block: TM_CHUNK is a multiple of TM_QUANT_BLOCK. */
static void tm_adamw_8bit_range(void *context, size_t begin, size_t end) {
  const tm_adamw_8bit_job *job = context;
  size_t i = begin;
  for (; end - i >= TM_QUANT_BLOCK; i += TM_QUANT_BLOCK) tm_adamw_8bit_block(job, i, TM_QUANT_BLOCK);
  if (i < end) tm_adamw_8bit_block(job, i, end - i);
}

int tm_adamw_8bit_update(tm_pool *pool, uint32_t isa, const tm_adamw *hyper, size_t n,
                         const tm_weights *weights, const tm_moments_8bit *moments) {
  tm_adamw_8bit_job job = {.codec = tm_codec_of(isa), .update = tm_adamw_range(isa)};
  int error = tm_isa_check(isa);
  if (error == 0) error = tm_weights_form(weights, n, &job.form);
  if (error != 0) return error;
  if (hyper == NULL || hyper->decay_kind > TM_DECAY_L2 || moments == NULL) return -EINVAL;
  if (n != 0 && (moments->exp_avg == NULL || moments->exp_avg_scale == NULL ||
                 moments->exp_avg_sq == NULL || moments->exp_avg_sq_scale == NULL))
    return -EINVAL;
  job.terms = tm_adamw_prepare(hyper);
  job.weights = *weights;
  job.moments = *moments;
  tm_pool_run(pool, n, TM_CHUNK, tm_adamw_8bit_range, &job);
  return 0;
}
