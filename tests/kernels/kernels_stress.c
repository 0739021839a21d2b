/* Every kernel on every variant of this machine, with memory of exactly the size that it may touch:
 * for the sanitizers. Prints "ok". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tiermem.h"

static const size_t LENGTHS[] = {0, 1, 7, 17, 255, 256, 257, 1000, 65536 + 259, 3 * 65536 + 5};

static uint32_t state = 1;

static float next_float(void) {
  state = state * 1664525u + 1013904223u;
  return ((float)(state >> 8) / (float)(1 << 24) - 0.5f) * ((state >> 28) < 2 ? 1e-20f : 4.0f);
}

static void check(int error, const char *what) {
  if (error == 0) return;
  fprintf(stderr, "%s: %d\n", what, error);
  exit(1);
}

static size_t size_of(uint32_t dtype) { return dtype == TM_FLOAT32 ? 4 : 2; }

/* n elements that begin at an odd multiple of their size, and end where the memory does. */
static void *make(size_t n, size_t size) {
  char *base = malloc((n + 1) * size);
  if (base == NULL) abort();
  return base + size;
}

static void drop(void *array, size_t size) { free((char *)array - size); }

static float *make_floats(size_t n, int positive) {
  float *values = make(n, sizeof(float));
  for (size_t i = 0; i < n; i++) {
    float value = next_float();
    values[i] = positive ? value * value : value;
  }
  return values;
}

static void *make_weights(size_t n, uint32_t dtype) {
  if (dtype == TM_FLOAT32) return make_floats(n, 0);
  uint16_t *halves = make(n, sizeof(uint16_t));
  for (size_t i = 0; i < n; i++) halves[i] = (uint16_t)(0x3c00 + (i * 37) % 512);
  return halves;
}

static void updates(tm_pool *pool, uint32_t isa, size_t n, const tm_weights *weights) {
  const size_t blocks = (n + TM_QUANT_BLOCK - 1) / TM_QUANT_BLOCK;
  tm_adamw adamw = {0.999f, 1e-3f, 0.1f, 0.95f, 0.05f, 1.0f, 1e-8f, 0.5f, TM_DECAY_DECOUPLED};
  tm_sgd sgd = {1e-3f, 0.9f, 1.0f, 0.1f, 0.5f, 1, 0};
  float *first = make_floats(n, 0), *second = make_floats(n, 1);
  tm_moments_8bit moments = {make(n, 1), make(blocks, 4), make(n, 1), make(blocks, 4)};

  check(tm_quantize(pool, isa, n, 1, first, moments.exp_avg, moments.exp_avg_scale), "quantize");
  check(tm_quantize(pool, isa, n, 0, second, moments.exp_avg_sq, moments.exp_avg_sq_scale),
        "quantize");
  check(tm_adamw_update(pool, isa, &adamw, n, weights, first, second), "adamw");
  check(tm_adamw_8bit_update(pool, isa, &adamw, n, weights, &moments), "adamw_8bit");
  adamw.decay_kind = TM_DECAY_L2;
  check(tm_adamw_update(pool, isa, &adamw, n, weights, first, second), "adam");
  check(tm_dequantize(pool, isa, n, 1, moments.exp_avg, moments.exp_avg_scale, first), "dequantize");
  check(tm_dequantize(pool, isa, n, 0, moments.exp_avg_sq, moments.exp_avg_sq_scale, second),
        "dequantize");
  check(tm_sgd_update(pool, isa, &sgd, n, weights, first), "sgd");
  check(tm_sgd_update(pool, isa, &sgd, n, weights, NULL), "sgd without momentum");
  drop(first, 4);
  drop(second, 4);
  drop(moments.exp_avg, 1);
  drop(moments.exp_avg_scale, 4);
  drop(moments.exp_avg_sq, 1);
  drop(moments.exp_avg_sq_scale, 4);
}

static void forms(tm_pool *pool, uint32_t isa, size_t n) {
  static const uint32_t FORMS[][3] = {
      /* master, param, grad */
      {TM_MASTER_NONE, TM_FLOAT32, TM_FLOAT32},    {TM_MASTER_SPLIT, TM_BFLOAT16, TM_FLOAT32},
      {TM_MASTER_SPLIT, TM_BFLOAT16, TM_BFLOAT16}, {TM_MASTER_WHOLE, TM_BFLOAT16, TM_FLOAT32},
      {TM_MASTER_WHOLE, TM_BFLOAT16, TM_BFLOAT16}, {TM_MASTER_WHOLE, TM_BFLOAT16, TM_FLOAT16},
      {TM_MASTER_WHOLE, TM_FLOAT16, TM_FLOAT32},   {TM_MASTER_WHOLE, TM_FLOAT16, TM_BFLOAT16},
      {TM_MASTER_WHOLE, TM_FLOAT16, TM_FLOAT16},
  };
  for (size_t k = 0; k < sizeof FORMS / sizeof *FORMS; k++) {
    const uint32_t master_form = FORMS[k][0], param = FORMS[k][1], grad = FORMS[k][2];
    const uint32_t master = master_form == TM_MASTER_WHOLE ? TM_FLOAT32 : TM_FLOAT16; /* its size */
    void *param_data = make_weights(n, param), *grad_data = make_weights(n, grad);
    void *master_data = make_weights(n, master);
    tm_weights weights = {param_data, master_data, grad_data, param, master_form, grad};
    if (master_form == TM_MASTER_NONE) weights.master = NULL;
    updates(pool, isa, n, &weights);
    drop(param_data, size_of(param));
    drop(grad_data, size_of(grad));
    drop(master_data, size_of(master));
  }
}

static void reductions(tm_pool *pool, uint32_t isa, size_t n) {
  float *values = make_floats(n, 0), *sum = make_floats(n, 0);
  uint16_t *hi = make(n, 2);
  int16_t *lo = make(n, 2);
  const void *parts[2] = {values, values};
  tm_reduction reduction = {sum, TM_FLOAT32, TM_FLOAT32, parts, 2, 0.5f, 1};
  double sum_squares;

  check(tm_split_master(pool, n, values, hi, lo), "split");
  check(tm_merge_master(pool, n, hi, lo, values), "merge");
  check(tm_reduce(pool, isa, n, &reduction, &sum_squares), "reduce");
  drop(values, 4);
  drop(sum, 4);
  drop(hi, 2);
  drop(lo, 2);
}

int main(void) {
  tm_pool *pool;
  check(tm_pool_create(3, &pool), "pool");
  for (uint32_t isa = TM_ISA_PLAIN; isa <= tm_isa_best(); isa++)
    for (size_t k = 0; k < sizeof LENGTHS / sizeof *LENGTHS; k++) {
      forms(pool, isa, LENGTHS[k]);
      reductions(pool, isa, LENGTHS[k]);
    }
  tm_pool_free(pool);
  puts("ok");
  return 0;
}
