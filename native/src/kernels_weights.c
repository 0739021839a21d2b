/* Which form weights have, and where they go on (see the header). */
#include <errno.h>

#include "kernels_weights.h"

static int tm_form_of(const tm_weights *w, tm_form *form) {
  const int half = w->param_dtype == TM_BFLOAT16 || w->param_dtype == TM_FLOAT16;
  switch (w->master_form) {
    case TM_MASTER_NONE:
      *form = TM_FP32;
      return w->param_dtype == TM_FLOAT32 && w->grad_dtype == TM_FLOAT32;
    case TM_MASTER_SPLIT:
      *form = TM_SPLIT;
      return w->param_dtype == TM_BFLOAT16 &&
             (w->grad_dtype == TM_FLOAT32 || w->grad_dtype == TM_BFLOAT16);
    case TM_MASTER_WHOLE:
      *form = w->param_dtype == TM_BFLOAT16 ? TM_COPY_BF16 : TM_COPY_FP16;
      return half && w->grad_dtype <= TM_FLOAT16;
    default: return 0;
  }
}

int tm_weights_form(const tm_weights *w, size_t n, tm_form *form) {
  if (w == NULL || !tm_form_of(w, form)) return -EINVAL;
  if (n == 0) return 0;
  if (w->param == NULL || w->grad == NULL) return -EINVAL;
  return *form != TM_FP32 && w->master == NULL ? -EINVAL : 0;
}

tm_weights tm_weights_from(const tm_weights *weights, tm_form form, size_t begin) {
  tm_weights w = *weights;
  w.param = (char *)w.param + begin * tm_size(w.param_dtype);
  w.grad = (const char *)w.grad + begin * tm_size(w.grad_dtype);
  if (form != TM_FP32)
    w.master = (char *)w.master + begin * (form == TM_SPLIT ? sizeof(int16_t) : sizeof(float));
  return w;
}
