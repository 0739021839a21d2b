/* SGD with momentum, on weights of every form (see the header). */
#include <errno.h>
#include <math.h>

#include "kernels_weights.h"

/* [Note: arithmetic of SGD]
 * One element, every operation rounded to fp32, as the vector path of torch's fused CPU
 * implementation does it (tried against torch 2.13; in the tails of its slices torch rounds
 * differently, as with AdamW):
 *   g  = g * grad_scale
 *   g  = fma(p, weight_decay, g)                          with weight decay
 *   b  = g at first, then fma(1 - dampening, g, b * momentum)
 *   g  = b, or fma(b, momentum, g) with nesterov          with momentum
 *   p  = fma(g, -lr, p)
 */
typedef enum {
  TM_NO_MOMENTUM,
  TM_MOMENTUM,
  TM_FIRST_MOMENTUM, /* the buffer is written, not read */
} tm_momentum_kind;

typedef struct {
  tm_sgd hyper;
  tm_form form;
  tm_momentum_kind kind;
  tm_weights weights;
  float *momentum;
} tm_sgd_job;

/* What the branches in the loops below ask is the same for all elements; the processor waits for
 * memory anyhow. */

/* ---- plain ------------------------------------------------------------------------------- */

TM_INLINE void tm_sgd_loop(const tm_sgd_job *job, size_t begin, size_t end, tm_form form,
                           uint32_t grad_dtype) {
  const tm_weights weights = job->weights, *w = &weights;
  const tm_sgd h = job->hyper;
  for (size_t i = begin; i < end; i++) {
    float p = tm_load_weight(w, i, form);
    float g = tm_load(w->grad, i, grad_dtype) * h.grad_scale;
    if (h.weight_decay != 0.0f) g = fmaf(p, h.weight_decay, g);
    if (job->kind != TM_NO_MOMENTUM) {
      float b = g;
      if (job->kind == TM_MOMENTUM) b = fmaf(h.one_minus_dampening, g, job->momentum[i] * h.momentum);
      job->momentum[i] = b;
      g = h.nesterov ? fmaf(b, h.momentum, g) : b;
    }
    tm_store_weight(w, i, form, fmaf(g, -h.lr, p));
  }
}

#if TM_X86
/* ---- AVX2: 8 elements -------------------------------------------------------------------- */

TM_INLINE TM_TARGET_AVX2 __m256 tm_sgd_momentum8(const tm_sgd_job *job, size_t i, __m256 g) {
  const __m256 momentum = _mm256_set1_ps(job->hyper.momentum);
  const __m256 undamped = _mm256_set1_ps(job->hyper.one_minus_dampening);
  __m256 b = g;
  if (job->kind == TM_MOMENTUM) {
    tm_prefetch(job->momentum + i);
    b = _mm256_mul_ps(_mm256_loadu_ps(job->momentum + i), momentum);
    b = _mm256_fmadd_ps(undamped, g, b);
  }
  _mm256_storeu_ps(job->momentum + i, b);
  return job->hyper.nesterov ? _mm256_fmadd_ps(b, momentum, g) : b;
}

TM_INLINE TM_TARGET_AVX2 void tm_sgd_loop8(const tm_sgd_job *job, size_t begin, size_t end,
                                           tm_form form, uint32_t grad_dtype) {
  const tm_weights weights = job->weights, *w = &weights;
  const __m256 scale = _mm256_set1_ps(job->hyper.grad_scale);
  const __m256 decay = _mm256_set1_ps(job->hyper.weight_decay);
  const __m256 minus_lr = _mm256_set1_ps(-job->hyper.lr);
  size_t i = begin;
  for (; end - i >= 8; i += 8) {
    __m256 p = tm_load_weight8(w, i, form), g = tm_load8(w->grad, i, grad_dtype);
    tm_prefetch_weights(w, i, form, grad_dtype);
    g = _mm256_mul_ps(g, scale);
    if (job->hyper.weight_decay != 0.0f) g = _mm256_fmadd_ps(p, decay, g);
    if (job->kind != TM_NO_MOMENTUM) g = tm_sgd_momentum8(job, i, g);
    tm_store_weight8(w, i, form, _mm256_fmadd_ps(g, minus_lr, p));
  }
  tm_sgd_loop(job, i, end, form, grad_dtype);
}

/* ---- AVX-512: 16 elements ---------------------------------------------------------------- */

TM_INLINE TM_TARGET_AVX512 __m512 tm_sgd_momentum16(const tm_sgd_job *job, size_t i, __m512 g) {
  const __m512 momentum = _mm512_set1_ps(job->hyper.momentum);
  const __m512 undamped = _mm512_set1_ps(job->hyper.one_minus_dampening);
  __m512 b = g;
  if (job->kind == TM_MOMENTUM) {
    tm_prefetch(job->momentum + i);
    b = _mm512_mul_ps(_mm512_loadu_ps(job->momentum + i), momentum);
    b = _mm512_fmadd_ps(undamped, g, b);
  }
  _mm512_storeu_ps(job->momentum + i, b);
  return job->hyper.nesterov ? _mm512_fmadd_ps(b, momentum, g) : b;
}

TM_INLINE TM_TARGET_AVX512 void tm_sgd_loop16(const tm_sgd_job *job, size_t begin, size_t end,
                                              tm_form form, uint32_t grad_dtype) {
  const tm_weights weights = job->weights, *w = &weights;
  const __m512 scale = _mm512_set1_ps(job->hyper.grad_scale);
  const __m512 decay = _mm512_set1_ps(job->hyper.weight_decay);
  const __m512 minus_lr = _mm512_set1_ps(-job->hyper.lr);
  size_t i = begin;
  for (; end - i >= 16; i += 16) {
    __m512 p = tm_load_weight16(w, i, form), g = tm_load16(w->grad, i, grad_dtype);
    tm_prefetch_weights(w, i, form, grad_dtype);
    g = _mm512_mul_ps(g, scale);
    if (job->hyper.weight_decay != 0.0f) g = _mm512_fmadd_ps(p, decay, g);
    if (job->kind != TM_NO_MOMENTUM) g = tm_sgd_momentum16(job, i, g);
    tm_store_weight16(w, i, form, _mm512_fmadd_ps(g, minus_lr, p));
  }
  tm_sgd_loop(job, i, end, form, grad_dtype);
}
#endif

/* ---- all forms --------------------------------------------------------------------------- */

static void tm_sgd_plain(void *context, size_t begin, size_t end) {
  const tm_sgd_job *job = context;
  TM_WEIGHTS_SWITCH(tm_sgd_loop, job->form, job->weights.grad_dtype)
}

#if TM_X86
TM_TARGET_AVX2 static void tm_sgd_avx2(void *context, size_t begin, size_t end) {
  const tm_sgd_job *job = context;
  TM_WEIGHTS_SWITCH(tm_sgd_loop8, job->form, job->weights.grad_dtype)
}

TM_TARGET_AVX512 static void tm_sgd_avx512(void *context, size_t begin, size_t end) {
  const tm_sgd_job *job = context;
  TM_WEIGHTS_SWITCH(tm_sgd_loop16, job->form, job->weights.grad_dtype)
}
#endif

/* ---- interface --------------------------------------------------------------------------- */

static tm_range_fn tm_sgd_range(uint32_t isa) {
#if TM_X86
  if (isa == TM_ISA_AVX512) return tm_sgd_avx512;
  if (isa == TM_ISA_AVX2) return tm_sgd_avx2;
#endif
  return tm_sgd_plain;
}

int tm_sgd_update(tm_pool *pool, uint32_t isa, const tm_sgd *hyper, size_t n,
                  const tm_weights *weights, float *momentum) {
  tm_sgd_job job = {.momentum = momentum};
  int error = tm_isa_check(isa);
  if (error == 0) error = tm_weights_form(weights, n, &job.form);
  if (error != 0) return error;
  if (hyper == NULL) return -EINVAL;
  job.hyper = *hyper;
  job.kind = momentum == NULL ? TM_NO_MOMENTUM : hyper->first ? TM_FIRST_MOMENTUM : TM_MOMENTUM;
  job.weights = *weights;
  tm_pool_run(pool, n, TM_CHUNK, tm_sgd_range(isa), &job);
  return 0;
}
