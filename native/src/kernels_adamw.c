/* AdamW on fp32 parameters, on split masters and on fp32 masters with a copy (see the header). */
#include <errno.h>
#include <math.h>

#include "kernels_vector.h"

/* [Note: arithmetic of AdamW]
 * One element, every operation rounded to fp32, as the vector path of torch's fused CPU
 * implementation does it:
 *   g  = g * grad_scale                                  (torch divides by its scale; 1 is neutral)
 *   p  = p * decay
 *   m  = fma(w, g - m, m)             where w = 1 - beta1 < 0.5, the usual case of a lerp
 *   m  = fma(w - 1, g - m, g)         otherwise
 *   v  = fma((1 - beta2) * g, g, v * beta2)
 *   d  = sqrt(v) / bias_correction2_sqrt + eps
 *   p  = p + (-step_size * m) / d
 * Of 15 associations and fusions tried against torch 2.13 this is the only one that matches, on AVX2
 * and on AVX-512; without AVX2 torch has no fma and differs. The scalar path that torch takes for the
 * tail of each of its slices fuses differently: there it differs from this by an ulp.
 */
typedef struct {
  float scale, decay, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps, minus_step;
  int lerp_from_grad; /* the second form of m */
} tm_adamw_terms;

/* Where the fp32 parameter comes from and goes to. */
typedef enum {
  TM_FP32,      /* master alone */
  TM_SPLIT,     /* half and lo */
  TM_COPY_BF16, /* master, rounded to half */
  TM_COPY_FP16,
} tm_form;

typedef struct {
  tm_adamw_terms terms;
  tm_form form;
  float *master;
  uint16_t *half;
  int16_t *lo;
  float *exp_avg, *exp_avg_sq;
  const void *grad;
  uint32_t grad_dtype;
} tm_adamw_job;

static tm_adamw_terms tm_adamw_prepare(const tm_adamw *hyper) {
  float weight = hyper->one_minus_beta1;
  int from_grad = !(fabsf(weight) < 0.5f);
  return (tm_adamw_terms){
      .scale = hyper->grad_scale,
      .decay = hyper->has_decay ? hyper->decay : 1.0f, /* times one changes no bit */
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
  for (size_t i = begin; i < end; i++) {
    float g = tm_load(job->grad, i, grad_dtype);
    float p = form == TM_SPLIT ? tm_from_bits(tm_merge(job->half[i], job->lo[i])) : job->master[i];
    p = tm_adamw_one(&job->terms, p, &job->exp_avg[i], &job->exp_avg_sq[i], g);
    if (form == TM_SPLIT)
      tm_split(tm_bits(p), &job->half[i], &job->lo[i]);
    else
      job->master[i] = p;
    if (form == TM_COPY_BF16) tm_store(job->half, i, TM_BFLOAT16, p);
    if (form == TM_COPY_FP16) tm_store(job->half, i, TM_FLOAT16, p);
  }
}

#if TM_X86
/* Five streams at once are more than the hardware prefetchers follow well, and the long chain of
 * divisions keeps the window of pending loads short. Half a kilobyte ahead was the best of 256 to
 * 4096 bytes on Zen 4, by a quarter over none. An address past the end is never touched. */
enum { TM_AHEAD_BYTES = 512 };

TM_INLINE void tm_prefetch(const void *address) {
  __builtin_prefetch((const void *)((uintptr_t)address + TM_AHEAD_BYTES), 0, 3);
}

TM_INLINE void tm_adamw_prefetch(const tm_adamw_job *job, size_t i, tm_form form,
                                 uint32_t grad_dtype) {
  size_t grad_size = grad_dtype == TM_FLOAT32 ? sizeof(float) : sizeof(uint16_t);
  tm_prefetch((const char *)job->grad + i * grad_size);
  if (form != TM_SPLIT) tm_prefetch(job->master + i);
  if (form == TM_SPLIT) tm_prefetch(job->lo + i);
  if (form != TM_FP32) tm_prefetch(job->half + i);
}

/* ---- AVX2: 8 elements -------------------------------------------------------------------- */

typedef struct {
  __m256 scale, decay, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps, minus_step;
  __m256 lerp_from_grad; /* all bits or none */
} tm_terms8;

#define TM_SPREAD8(field) .field = _mm256_set1_ps(terms->field)

TM_INLINE TM_TARGET_AVX2 tm_terms8 tm_adamw_spread8(const tm_adamw_terms *terms) {
  return (tm_terms8){
      TM_SPREAD8(scale),     TM_SPREAD8(decay),
      TM_SPREAD8(beta2),     TM_SPREAD8(lerp_weight),
      TM_SPREAD8(eps),       TM_SPREAD8(bias_correction2_sqrt),
      TM_SPREAD8(minus_step), TM_SPREAD8(one_minus_beta2),
      .lerp_from_grad = _mm256_castsi256_ps(_mm256_set1_epi32(terms->lerp_from_grad ? -1 : 0)),
  };
}

TM_INLINE TM_TARGET_AVX2 __m256 tm_adamw_eight(const tm_terms8 *t, __m256 p, float *exp_avg,
                                               float *exp_avg_sq, __m256 g) {
  __m256 m = _mm256_loadu_ps(exp_avg), v = _mm256_loadu_ps(exp_avg_sq), d;
  tm_prefetch(exp_avg);
  tm_prefetch(exp_avg_sq);
  g = _mm256_mul_ps(g, t->scale);
  p = _mm256_mul_ps(p, t->decay);
  m = _mm256_fmadd_ps(t->lerp_weight, _mm256_sub_ps(g, m), _mm256_blendv_ps(m, g, t->lerp_from_grad));
  v = _mm256_fmadd_ps(_mm256_mul_ps(t->one_minus_beta2, g), g, _mm256_mul_ps(v, t->beta2));
  d = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v), t->bias_correction2_sqrt), t->eps);
  _mm256_storeu_ps(exp_avg, m);
  _mm256_storeu_ps(exp_avg_sq, v);
  return _mm256_add_ps(p, _mm256_div_ps(_mm256_mul_ps(t->minus_step, m), d));
}

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

TM_INLINE TM_TARGET_AVX2 void tm_adamw_loop8(const tm_adamw_job *job, size_t begin, size_t end,
                                            tm_form form, uint32_t grad_dtype) {
  const tm_terms8 terms = tm_adamw_spread8(&job->terms);
  size_t i = begin;
  for (; end - i >= 8; i += 8) {
    __m256 g = tm_load8(job->grad, i, grad_dtype);
    __m256 p = form == TM_SPLIT ? tm_merge8(job->half + i, job->lo + i)
                              : _mm256_loadu_ps(job->master + i);
    tm_adamw_prefetch(job, i, form, grad_dtype);
    p = tm_adamw_eight(&terms, p, job->exp_avg + i, job->exp_avg_sq + i, g);
    if (form == TM_SPLIT)
      tm_split8(p, job->half + i, job->lo + i);
    else
      _mm256_storeu_ps(job->master + i, p);
    if (form == TM_COPY_BF16) tm_store8(job->half, i, TM_BFLOAT16, p);
    if (form == TM_COPY_FP16) tm_store8(job->half, i, TM_FLOAT16, p);
  }
  tm_adamw_loop(job, i, end, form, grad_dtype);
}

/* ---- AVX-512: 16 elements ---------------------------------------------------------------- */

typedef struct {
  __m512 scale, decay, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps, minus_step;
  __mmask16 lerp_from_grad;
} tm_terms16;

#define TM_SPREAD16(field) .field = _mm512_set1_ps(terms->field)

TM_INLINE TM_TARGET_AVX512 tm_terms16 tm_adamw_spread16(const tm_adamw_terms *terms) {
  return (tm_terms16){
      TM_SPREAD16(scale),      TM_SPREAD16(decay),
      TM_SPREAD16(beta2),      TM_SPREAD16(lerp_weight),
      TM_SPREAD16(eps),        TM_SPREAD16(bias_correction2_sqrt),
      TM_SPREAD16(minus_step), TM_SPREAD16(one_minus_beta2),
      .lerp_from_grad = (__mmask16)(terms->lerp_from_grad ? 0xffff : 0),
  };
}

TM_INLINE TM_TARGET_AVX512 __m512 tm_adamw_sixteen(const tm_terms16 *t, __m512 p, float *exp_avg,
                                                   float *exp_avg_sq, __m512 g) {
  __m512 m = _mm512_loadu_ps(exp_avg), v = _mm512_loadu_ps(exp_avg_sq), d;
  tm_prefetch(exp_avg);
  tm_prefetch(exp_avg_sq);
  g = _mm512_mul_ps(g, t->scale);
  p = _mm512_mul_ps(p, t->decay);
  m = _mm512_fmadd_ps(t->lerp_weight, _mm512_sub_ps(g, m),
                      _mm512_mask_blend_ps(t->lerp_from_grad, m, g));
  v = _mm512_fmadd_ps(_mm512_mul_ps(t->one_minus_beta2, g), g, _mm512_mul_ps(v, t->beta2));
  d = _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v), t->bias_correction2_sqrt), t->eps);
  _mm512_storeu_ps(exp_avg, m);
  _mm512_storeu_ps(exp_avg_sq, v);
  return _mm512_add_ps(p, _mm512_div_ps(_mm512_mul_ps(t->minus_step, m), d));
}

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

TM_INLINE TM_TARGET_AVX512 void tm_adamw_loop16(const tm_adamw_job *job, size_t begin, size_t end,
                                            tm_form form, uint32_t grad_dtype) {
  const tm_terms16 terms = tm_adamw_spread16(&job->terms);
  size_t i = begin;
  for (; end - i >= 16; i += 16) {
    __m512 g = tm_load16(job->grad, i, grad_dtype);
    __m512 p = form == TM_SPLIT ? tm_merge16(job->half + i, job->lo + i)
                              : _mm512_loadu_ps(job->master + i);
    tm_adamw_prefetch(job, i, form, grad_dtype);
    p = tm_adamw_sixteen(&terms, p, job->exp_avg + i, job->exp_avg_sq + i, g);
    if (form == TM_SPLIT)
      tm_split16(p, job->half + i, job->lo + i);
    else
      _mm512_storeu_ps(job->master + i, p);
    if (form == TM_COPY_BF16) tm_store16(job->half, i, TM_BFLOAT16, p);
    if (form == TM_COPY_FP16) tm_store16(job->half, i, TM_FLOAT16, p);
  }
  tm_adamw_loop(job, i, end, form, grad_dtype);
}
#endif

/* ---- all forms ---------------------------------------------------------------------------- */

/* Each case repeats the call with constants, so that the loop has no switch in it. */
#define TM_COMBINATION(form, grad_dtype) ((form) * 3 + (grad_dtype))
#define TM_CASE(loop, form, grad_dtype)       \
  case TM_COMBINATION(form, grad_dtype):      \
    loop(job, begin, end, form, grad_dtype);  \
    break;
#define TM_SWITCH(loop)                                \
  switch (TM_COMBINATION(job->form, job->grad_dtype)) { \
    TM_CASE(loop, TM_FP32, TM_FLOAT32)                 \
    TM_CASE(loop, TM_SPLIT, TM_FLOAT32)                \
    TM_CASE(loop, TM_SPLIT, TM_BFLOAT16)               \
    TM_CASE(loop, TM_COPY_BF16, TM_FLOAT32)            \
    TM_CASE(loop, TM_COPY_BF16, TM_BFLOAT16)           \
    TM_CASE(loop, TM_COPY_BF16, TM_FLOAT16)            \
    TM_CASE(loop, TM_COPY_FP16, TM_FLOAT32)            \
    TM_CASE(loop, TM_COPY_FP16, TM_BFLOAT16)           \
    TM_CASE(loop, TM_COPY_FP16, TM_FLOAT16)            \
  }

static void tm_adamw_plain(void *context, size_t begin, size_t end) {
  const tm_adamw_job *job = context;
  TM_SWITCH(tm_adamw_loop)
}

#if TM_X86
TM_TARGET_AVX2 static void tm_adamw_avx2(void *context, size_t begin, size_t end) {
  const tm_adamw_job *job = context;
  TM_SWITCH(tm_adamw_loop8)
}

TM_TARGET_AVX512 static void tm_adamw_avx512(void *context, size_t begin, size_t end) {
  const tm_adamw_job *job = context;
  TM_SWITCH(tm_adamw_loop16)
}
#endif

/* ---- interface --------------------------------------------------------------------------- */

static tm_range_fn tm_adamw_range(uint32_t isa) {
#if TM_X86
  if (isa == TM_ISA_AVX512) return tm_adamw_avx512;
  if (isa == TM_ISA_AVX2) return tm_adamw_avx2;
#endif
  return tm_adamw_plain;
}

static int tm_adamw_run(tm_pool *pool, uint32_t isa, const tm_adamw *hyper, size_t n,
                        tm_adamw_job *job) {
  int error = tm_isa_check(isa);
  if (error != 0) return error;
  if (hyper == NULL) return -EINVAL;
  if (n != 0 && ((job->form != TM_SPLIT && job->master == NULL) ||
                 (job->form != TM_FP32 && job->half == NULL) ||
                 (job->form == TM_SPLIT && job->lo == NULL) || job->exp_avg == NULL ||
                 job->exp_avg_sq == NULL || job->grad == NULL))
    return -EINVAL;
  job->terms = tm_adamw_prepare(hyper);
  tm_pool_run(pool, n, TM_CHUNK, tm_adamw_range(isa), job);
  return 0;
}

int tm_adamw_fp32(tm_pool *pool, uint32_t isa, const tm_adamw *hyper, size_t n, float *param,
                  float *exp_avg, float *exp_avg_sq, const float *grad) {
  tm_adamw_job job = {.form = TM_FP32,
                      .master = param,
                      .exp_avg = exp_avg,
                      .exp_avg_sq = exp_avg_sq,
                      .grad = grad,
                      .grad_dtype = TM_FLOAT32};
  return tm_adamw_run(pool, isa, hyper, n, &job);
}

int tm_adamw_split(tm_pool *pool, uint32_t isa, const tm_adamw *hyper, size_t n, uint16_t *hi,
                   int16_t *lo, float *exp_avg, float *exp_avg_sq, const void *grad,
                   uint32_t grad_dtype) {
  if (grad_dtype != TM_FLOAT32 && grad_dtype != TM_BFLOAT16) return -EINVAL;
  tm_adamw_job job = {.form = TM_SPLIT,
                      .half = hi,
                      .lo = lo,
                      .exp_avg = exp_avg,
                      .exp_avg_sq = exp_avg_sq,
                      .grad = grad,
                      .grad_dtype = grad_dtype};
  return tm_adamw_run(pool, isa, hyper, n, &job);
}

int tm_adamw_master(tm_pool *pool, uint32_t isa, const tm_adamw *hyper, size_t n, uint16_t *param,
                    uint32_t param_dtype, float *master, float *exp_avg, float *exp_avg_sq,
                    const void *grad, uint32_t grad_dtype) {
  if (param_dtype != TM_BFLOAT16 && param_dtype != TM_FLOAT16) return -EINVAL;
  if (grad_dtype > TM_FLOAT16) return -EINVAL;
  tm_adamw_job job = {.form = param_dtype == TM_BFLOAT16 ? TM_COPY_BF16 : TM_COPY_FP16,
                      .half = param,
                      .master = master,
                      .exp_avg = exp_avg,
                      .exp_avg_sq = exp_avg_sq,
                      .grad = grad,
                      .grad_dtype = grad_dtype};
  return tm_adamw_run(pool, isa, hyper, n, &job);
}
