/* Adam and AdamW with fp32 moments, on weights of every form (see the header). */
#include <errno.h>
#include <math.h>

#include "kernels_adamw.h"

/* [Note: arithmetic of AdamW]
 * One element, every operation rounded to fp32, as the vector path of torch's fused CPU
 * implementation does it:
 *   g  = g * grad_scale                                  (torch divides by its scale; 1 is neutral)
 *   g  = fma(p, weight_decay, g)                         with L2 decay (Adam)
 *   p  = p * decay                                       with decoupled decay (AdamW)
 *   m  = fma(w, g - m, m)             where w = 1 - beta1 < 0.5, the usual case of a lerp
 *   m  = fma(w - 1, g - m, g)         otherwise
 *   v  = fma((1 - beta2) * g, g, v * beta2)
 *   d  = sqrt(v) / bias_correction2_sqrt + eps
 *   p  = p + (-step_size * m) / d
 * Of 15 associations and fusions tried against torch 2.13 this is the only one that matches, on AVX2
 * and on AVX-512; without AVX2 torch has no fma and differs. The scalar path that torch takes for the
 * tail of each of its slices fuses differently: there it differs from this by an ulp.
 */
tm_adamw_terms tm_adamw_prepare(const tm_adamw *hyper) {
  float weight = hyper->one_minus_beta1;
  int from_grad = !(fabsf(weight) < 0.5f);
  return (tm_adamw_terms){
      .scale = hyper->grad_scale,
      /* times one changes no bit */
      .decay = hyper->decay_kind == TM_DECAY_DECOUPLED ? hyper->decay : 1.0f,
      .l2 = hyper->decay,
      .has_l2 = hyper->decay_kind == TM_DECAY_L2,
      .lerp_weight = from_grad ? weight - 1.0f : weight,
      .lerp_from_grad = from_grad,
      .beta2 = hyper->beta2,
      .one_minus_beta2 = hyper->one_minus_beta2,
      .bias_correction2_sqrt = hyper->bias_correction2_sqrt,
      .eps = hyper->eps,
      .minus_step = -hyper->step_size,
  };
}

/* ---- plain ------------------------------------------------------------------------------- */

TM_INLINE float tm_adamw_one(const tm_adamw_terms *t, float p, float *exp_avg, float *exp_avg_sq,
                             float g) {
  float m = *exp_avg, v = *exp_avg_sq, d;
  g = g * t->scale;
  if (t->has_l2) g = fmaf(p, t->l2, g);
  p = p * t->decay;
  m = fmaf(t->lerp_weight, g - m, t->lerp_from_grad ? g : m);
  v = fmaf(t->one_minus_beta2 * g, g, v * t->beta2);
  d = sqrtf(v) / t->bias_correction2_sqrt + t->eps;
  *exp_avg = m;
  *exp_avg_sq = v;
  return p + (t->minus_step * m) / d;
}

TM_INLINE void tm_adamw_loop(const tm_adamw_job *job, size_t begin, size_t end, tm_form form,
                             uint32_t grad_dtype) {
  const tm_weights weights = job->weights, *w = &weights;
  for (size_t i = begin; i < end; i++) {
    float p = tm_load_weight(w, i, form), g = tm_load(w->grad, i, grad_dtype);
    p = tm_adamw_one(&job->terms, p, &job->exp_avg[i], &job->exp_avg_sq[i], g);
    tm_store_weight(w, i, form, p);
  }
}

#if TM_X86
/* ---- AVX2: 8 elements -------------------------------------------------------------------- */

typedef struct {
  __m256 scale, decay, l2, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps, minus_step;
  __m256 lerp_from_grad; /* all bits or none */
  int has_l2;
} tm_terms8;

#define TM_SPREAD8(field) .field = _mm256_set1_ps(terms->field)

TM_INLINE TM_TARGET_AVX2 tm_terms8 tm_adamw_spread8(const tm_adamw_terms *terms) {
  return (tm_terms8){
      TM_SPREAD8(scale),     TM_SPREAD8(decay),
      TM_SPREAD8(beta2),     TM_SPREAD8(lerp_weight),
      TM_SPREAD8(eps),       TM_SPREAD8(bias_correction2_sqrt),
      TM_SPREAD8(minus_step), TM_SPREAD8(one_minus_beta2),
      TM_SPREAD8(l2),
      .has_l2 = terms->has_l2,
      .lerp_from_grad = _mm256_castsi256_ps(_mm256_set1_epi32(terms->lerp_from_grad ? -1 : 0)),
  };
}

TM_INLINE TM_TARGET_AVX2 __m256 tm_adamw_eight(const tm_terms8 *t, __m256 p, float *exp_avg,
                                               float *exp_avg_sq, __m256 g) {
  __m256 m = _mm256_loadu_ps(exp_avg), v = _mm256_loadu_ps(exp_avg_sq), d;
  tm_prefetch(exp_avg);
  tm_prefetch(exp_avg_sq);
  g = _mm256_mul_ps(g, t->scale);
  if (t->has_l2) g = _mm256_fmadd_ps(p, t->l2, g);
  p = _mm256_mul_ps(p, t->decay);
  m = _mm256_fmadd_ps(t->lerp_weight, _mm256_sub_ps(g, m), _mm256_blendv_ps(m, g, t->lerp_from_grad));
  v = _mm256_fmadd_ps(_mm256_mul_ps(t->one_minus_beta2, g), g, _mm256_mul_ps(v, t->beta2));
  d = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v), t->bias_correction2_sqrt), t->eps);
  _mm256_storeu_ps(exp_avg, m);
  _mm256_storeu_ps(exp_avg_sq, v);
  return _mm256_add_ps(p, _mm256_div_ps(_mm256_mul_ps(t->minus_step, m), d));
}

TM_INLINE TM_TARGET_AVX2 void tm_adamw_loop8(const tm_adamw_job *job, size_t begin, size_t end,
                                            tm_form form, uint32_t grad_dtype) {
  const tm_terms8 terms = tm_adamw_spread8(&job->terms);
  const tm_weights weights = job->weights, *w = &weights;
  size_t i = begin;
  for (; end - i >= 8; i += 8) {
    __m256 p = tm_load_weight8(w, i, form), g = tm_load8(w->grad, i, grad_dtype);
    tm_prefetch_weights(w, i, form, grad_dtype);
    p = tm_adamw_eight(&terms, p, job->exp_avg + i, job->exp_avg_sq + i, g);
    tm_store_weight8(w, i, form, p);
  }
  tm_adamw_loop(job, i, end, form, grad_dtype);
}

/* ---- AVX-512: 16 elements ---------------------------------------------------------------- */

typedef struct {
  __m512 scale, decay, l2, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps, minus_step;
  __mmask16 lerp_from_grad;
  int has_l2;
} tm_terms16;

#define TM_SPREAD16(field) .field = _mm512_set1_ps(terms->field)

TM_INLINE TM_TARGET_AVX512 tm_terms16 tm_adamw_spread16(const tm_adamw_terms *terms) {
  return (tm_terms16){
      TM_SPREAD16(scale),      TM_SPREAD16(decay),
      TM_SPREAD16(beta2),      TM_SPREAD16(lerp_weight),
      TM_SPREAD16(eps),        TM_SPREAD16(bias_correction2_sqrt),
      TM_SPREAD16(minus_step), TM_SPREAD16(one_minus_beta2),
      TM_SPREAD16(l2),
      .has_l2 = terms->has_l2,
      .lerp_from_grad = (__mmask16)(terms->lerp_from_grad ? 0xffff : 0),
  };
}

TM_INLINE TM_TARGET_AVX512 __m512 tm_adamw_sixteen(const tm_terms16 *t, __m512 p, float *exp_avg,
                                                   float *exp_avg_sq, __m512 g) {
  __m512 m = _mm512_loadu_ps(exp_avg), v = _mm512_loadu_ps(exp_avg_sq), d;
  tm_prefetch(exp_avg);
  tm_prefetch(exp_avg_sq);
  g = _mm512_mul_ps(g, t->scale);
  if (t->has_l2) g = _mm512_fmadd_ps(p, t->l2, g);
  p = _mm512_mul_ps(p, t->decay);
  m = _mm512_fmadd_ps(t->lerp_weight, _mm512_sub_ps(g, m),
                      _mm512_mask_blend_ps(t->lerp_from_grad, m, g));
  v = _mm512_fmadd_ps(_mm512_mul_ps(t->one_minus_beta2, g), g, _mm512_mul_ps(v, t->beta2));
  d = _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v), t->bias_correction2_sqrt), t->eps);
  _mm512_storeu_ps(exp_avg, m);
  _mm512_storeu_ps(exp_avg_sq, v);
  return _mm512_add_ps(p, _mm512_div_ps(_mm512_mul_ps(t->minus_step, m), d));
}

TM_INLINE TM_TARGET_AVX512 void tm_adamw_loop16(const tm_adamw_job *job, size_t begin, size_t end,
                                            tm_form form, uint32_t grad_dtype) {
  const tm_terms16 terms = tm_adamw_spread16(&job->terms);
  const tm_weights weights = job->weights, *w = &weights;
  size_t i = begin;
  for (; end - i >= 16; i += 16) {
    __m512 p = tm_load_weight16(w, i, form), g = tm_load16(w->grad, i, grad_dtype);
    tm_prefetch_weights(w, i, form, grad_dtype);
    p = tm_adamw_sixteen(&terms, p, job->exp_avg + i, job->exp_avg_sq + i, g);
    tm_store_weight16(w, i, form, p);
  }
  tm_adamw_loop(job, i, end, form, grad_dtype);
}
#endif

/* ---- all forms ---------------------------------------------------------------------------- */

static void tm_adamw_plain(void *context, size_t begin, size_t end) {
  const tm_adamw_job *job = context;
  TM_WEIGHTS_SWITCH(tm_adamw_loop, job->form, job->weights.grad_dtype)
}

#if TM_X86
TM_TARGET_AVX2 static void tm_adamw_avx2(void *context, size_t begin, size_t end) {
  const tm_adamw_job *job = context;
  TM_WEIGHTS_SWITCH(tm_adamw_loop8, job->form, job->weights.grad_dtype)
}

TM_TARGET_AVX512 static void tm_adamw_avx512(void *context, size_t begin, size_t end) {
  const tm_adamw_job *job = context;
  TM_WEIGHTS_SWITCH(tm_adamw_loop16, job->form, job->weights.grad_dtype)
}
#endif

/* ---- interface --------------------------------------------------------------------------- */

tm_range_fn tm_adamw_range(uint32_t isa) {
#if TM_X86
  if (isa == TM_ISA_AVX512) return tm_adamw_avx512;
  if (isa == TM_ISA_AVX2) return tm_adamw_avx2;
#endif
  return tm_adamw_plain;
}

int tm_adamw_update(tm_pool *pool, uint32_t isa, const tm_adamw *hyper, size_t n,
                    const tm_weights *weights, float *exp_avg, float *exp_avg_sq) {
  tm_adamw_job job = {.exp_avg = exp_avg, .exp_avg_sq = exp_avg_sq};
  int error = tm_isa_check(isa);
  if (error == 0) error = tm_weights_form(weights, n, &job.form);
  if (error != 0) return error;
  if (hyper == NULL || hyper->decay_kind > TM_DECAY_L2) return -EINVAL;
  if (n != 0 && (exp_avg == NULL || exp_avg_sq == NULL)) return -EINVAL;
  job.terms = tm_adamw_prepare(hyper);
  job.weights = *weights;
  tm_pool_run(pool, n, TM_CHUNK, tm_adamw_range(isa), &job);
  return 0;
}
