/* One update by Adam, for the kernels that keep its moments in other ways. */
#ifndef TM_KERNELS_ADAMW_H
#define TM_KERNELS_ADAMW_H

#include "kernels_weights.h"

typedef struct {
  float scale, decay, l2, lerp_weight, beta2, one_minus_beta2, bias_correction2_sqrt, eps, minus_step;
  int has_l2;
  int lerp_from_grad; /* the second form of m */
} tm_adamw_terms;

typedef struct {
  tm_adamw_terms terms;
  tm_form form;
  tm_weights weights;
  float *exp_avg, *exp_avg_sq;
} tm_adamw_job;

tm_adamw_terms tm_adamw_prepare(const tm_adamw *hyper);

/* Works on a tm_adamw_job. */
tm_range_fn tm_adamw_range(uint32_t isa);

#endif
