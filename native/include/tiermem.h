/* tiermem.h: the whole interface of the native core. Knows no Python and no torch.
 *
 * Conventions: functions return 0 or -errno; out-parameters come last; handles are opaque; nothing
 * prints, nothing is global. All functions may be called from any thread unless said otherwise.
 *
 * The declarations between the two markers are given to cffi as they stand, so they use no
 * preprocessor beyond comments.
 */
#ifndef TIERMEM_H
#define TIERMEM_H

#include <stddef.h>
#include <stdint.h>

/* cffi-begin */

/* ---- I/O engine -------------------------------------------------------------------------- */

typedef struct tm_engine tm_engine;   /* owns queues and their threads */
typedef struct tm_request tm_request; /* one transfer; freed by tm_request_free */

enum { TM_OP_READ = 0, TM_OP_WRITE = 1 };
enum { TM_PRIORITY_DEMAND = 0, TM_PRIORITY_BACKGROUND = 1 };
enum { TM_FAULT_ERROR = 0, TM_FAULT_SHORT = 1, TM_FAULT_SUBMIT_ERROR = 2, TM_FAULT_PARTIAL_SUBMIT = 3 };
enum { TM_FAULT_REAP_ERROR = 4 }; /* once that chunk was handed over, its queue cannot collect any more */
enum { TM_BACKEND_LIBAIO = 0, TM_BACKEND_IO_URING = 1, TM_BACKEND_THREADS = 2 };

typedef struct {
  uint64_t chunk_bytes;
  uint32_t read_depth;
  uint32_t write_depth;
} tm_queue_options;

typedef struct {
  uint32_t op;
  uint32_t priority;
  int32_t fd;
  uint64_t offset;
  void *buffer;
  uint64_t length;
} tm_io;

typedef struct {
  int32_t status;       /* 0, or -errno of the first failed chunk; -ENODATA: end of file */
  uint64_t failed_at;   /* offset of that chunk within the request */
  uint64_t transferred; /* bytes moved in all */
} tm_result;

typedef struct {
  uint32_t op;
  uint32_t kind;
  int32_t error; /* positive errno */
  uint64_t nth;
  uint64_t repeat; /* 0 disarms */
} tm_fault;

typedef struct {
  uint64_t read_bytes, written_bytes, copied_bytes;
  uint64_t read_chunks, written_chunks;
  uint64_t submit_calls, retries;
  uint64_t max_in_flight;
} tm_engine_stats;

typedef struct {
  uint64_t bytes;  /* registered by now, summed over the queues */
  uint64_t chunks; /* that used it */
  int32_t refusal; /* 0, or -errno of the last attempt that the kernel refused */
} tm_memory_stats;

/* How long chunks took, from their first submission to the backend to their end, in logarithmic
 * buckets: bucket i < 16 holds i ns; above, each power of two has 16 buckets of equal width, so a
 * bucket's width is at most 1/16 of its lower bound. The last also holds all from 2^40 ns on. */
enum { TM_LATENCY_BUCKETS = 592 };
typedef struct {
  uint64_t sum_ns; /* of all chunks counted, not of the buckets' bounds */
  uint64_t buckets[TM_LATENCY_BUCKETS];
} tm_latency;

/* -ENOSYS and others where the backend does not work here: it is set up once, as for a queue. */
int tm_engine_create(uint32_t backend, tm_engine **out);
int tm_engine_add_queue(tm_engine *engine, const tm_queue_options *options, uint32_t *queue);
/* Starts count transfers with one hand-over, in their order; out takes as many. All of them or none.
 * When the backend of a queue fails for good, so that ends can no longer be collected, everything
 * submitted to it ends with that error (what the kernel has, when it is done with the memory), and
 * so does each further submit. */
int tm_engine_submit(tm_engine *engine, uint32_t queue, uint32_t count, const tm_io *ios,
                     tm_request **out);
int tm_engine_copy(tm_engine *engine, void *destination, const void *source, uint64_t length,
                   tm_request **out);
/* Ends everything submitted to the queue that has not been given to the kernel with -ECANCELED, soon,
 * on the queue's thread; what has been goes on. For the rest of a request that had begun, too. */
int tm_engine_cancel(tm_engine *engine, uint32_t queue);
int tm_engine_inject(tm_engine *engine, const tm_fault *fault);
int tm_engine_get_stats(tm_engine *engine, tm_engine_stats *out);
int tm_engine_queue_stats(tm_engine *engine, uint32_t queue, tm_engine_stats *out);
/* Of the chunks of one queue and operation that ended well, since the queue was added. */
int tm_engine_latency(tm_engine *engine, uint32_t queue, uint32_t op, tm_latency *out);
/* Lets queues, also those added later, prepare this memory for cheaper transfers. It is done piece by
 * piece when transfers first touch it, pins what they touch (and up to 32 MiB around it), and goes on
 * without where the kernel refuses. -EOPNOTSUPP from backends that cannot; -EEXIST where it overlaps
 * what is registered; -ENOSPC after 8 ranges. The memory must stay mapped until unregister (-ENOENT
 * for an unknown base) or close, and no transfer of it may be in flight then. */
int tm_engine_register(tm_engine *engine, void *base, uint64_t length);
int tm_engine_unregister(tm_engine *engine, void *base);
int tm_engine_memory_stats(tm_engine *engine, tm_memory_stats *out);
/* Drains what is in flight and joins the threads; no call on the engine may follow but free. */
int tm_engine_close(tm_engine *engine);
void tm_engine_free(tm_engine *engine); /* after close, and after every request was freed */

/* 0 when complete (see tm_request_result), -ETIMEDOUT. timeout_ns < 0 waits for ever, 0 polls. */
int tm_request_wait(tm_request *request, int64_t timeout_ns);
int tm_request_result(tm_request *request, tm_result *out); /* -EBUSY while in flight */
void tm_request_free(tm_request *request);                  /* waits if still in flight */

/* ---- kernels ----------------------------------------------------------------------------- */

typedef struct tm_pool tm_pool; /* worker threads; one caller at a time runs on it, others wait */

int tm_pool_create(uint32_t num_threads, tm_pool **out);
void tm_pool_free(tm_pool *pool);

enum { TM_ISA_PLAIN = 0, TM_ISA_AVX2 = 1, TM_ISA_AVX512 = 2 };
enum { TM_FLOAT32 = 0, TM_BFLOAT16 = 1, TM_FLOAT16 = 2 };

uint32_t tm_isa_best(void); /* the best this processor and system run */

/* The fp32 parameter of an update in one of three forms, with its gradient. n elements, any
 * alignment; the gradient is read only.
 * TM_MASTER_NONE: param is fp32, so is grad; master is not used.
 * TM_MASTER_SPLIT: param is bf16 (hi), master is int16 (lo), bits(parameter) = ((uint32)hi << 16) + lo,
 *   rounded to hi with ties away from zero; grad is bf16 or fp32.
 * TM_MASTER_WHOLE: master is fp32, and param = master rounded to bf16 or fp16: nearest even, every NaN
 *   the same one; param is not read; grad is of any dtype. */
enum { TM_MASTER_NONE = 0, TM_MASTER_SPLIT = 1, TM_MASTER_WHOLE = 2 };
typedef struct {
  void *param;
  void *master;
  const void *grad;
  uint32_t param_dtype, master_form, grad_dtype;
} tm_weights;

/* The scalars of one update by Adam, computed by the caller in double and rounded once, as torch's
 * fused implementation does. */
enum { TM_DECAY_NONE = 0, TM_DECAY_DECOUPLED = 1, TM_DECAY_L2 = 2 };
typedef struct {
  float decay;            /* decoupled (AdamW): 1 - lr * weight_decay; L2 (Adam): weight_decay */
  float step_size;        /* lr / (1 - beta1^t) */
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float bias_correction2_sqrt;
  float eps;
  float grad_scale;       /* multiplies each gradient first: unscale x clip factor x (+1 or -1) */
  uint32_t decay_kind;    /* TM_DECAY_NONE: decay is not applied */
} tm_adamw;

/* In place on the weights and the moments. */
int tm_adamw_update(tm_pool *pool, uint32_t isa, const tm_adamw *hyper, size_t n,
                    const tm_weights *weights, float *exp_avg, float *exp_avg_sq);

/* The scalars of one update by SGD, rounded from double. */
typedef struct {
  float lr;
  float momentum;
  float one_minus_dampening;
  float weight_decay;     /* 0: not applied */
  float grad_scale;       /* as for tm_adamw */
  uint32_t nesterov;
  uint32_t first;         /* the momentum buffer is not read: it starts as the gradient */
} tm_sgd;

/* In place on the weights and the momentum buffer; NULL: without momentum. */
int tm_sgd_update(tm_pool *pool, uint32_t isa, const tm_sgd *hyper, size_t n,
                  const tm_weights *weights, float *momentum);
/* Values in 8-bit codes: blocks of TM_QUANT_BLOCK elements from the start of the array, the last
 * shorter, with one scale each, their largest magnitude. The format is in kernels_codes.c. */
enum { TM_QUANT_BLOCK = 256 };
int tm_quantize(tm_pool *pool, uint32_t isa, size_t n, uint32_t is_signed, const float *values,
                uint8_t *codes, float *scales);
int tm_dequantize(tm_pool *pool, uint32_t isa, size_t n, uint32_t is_signed, const uint8_t *codes,
                  const float *scales, float *values);

typedef struct {
  uint8_t *exp_avg; /* signed codes */
  float *exp_avg_scale;
  uint8_t *exp_avg_sq; /* unsigned codes */
  float *exp_avg_sq_scale;
} tm_moments_8bit;

/* tm_adamw_update with the moments in codes: they are dequantized, updated, used and quantized again,
 * block by block. */
int tm_adamw_8bit_update(tm_pool *pool, uint32_t isa, const tm_adamw *hyper, size_t n,
                         const tm_weights *weights, const tm_moments_8bit *moments);

int tm_split_master(tm_pool *pool, size_t n, const float *master, uint16_t *hi, int16_t *lo);
int tm_merge_master(tm_pool *pool, size_t n, const uint16_t *hi, const int16_t *lo, float *master);

/* n elements, any alignment; a part is disjoint from the destination, or is the destination itself
 * with the same dtype. */
typedef struct {
  void *destination;
  uint32_t destination_dtype;
  uint32_t part_dtype; /* of all parts */
  const void *const *parts;
  uint32_t num_parts;  /* 1 to TM_MAX_PARTS */
  float scale;
  uint32_t add;        /* 1: the destination is a summand */
} tm_reduction;

/* destination = [destination +] scale * (((parts[0] + parts[1]) + parts[2]) + ...), every operation
 * rounded to fp32, the result to the destination's dtype: nearest even, every NaN of 16 bits the
 * same one, except that one part of the destination's dtype, not scaled, is copied bit by bit. Sums the squares of the destination in fp64 in the canonical order: blocks of
 * TM_NORM_BLOCK elements from the start of the array; within a block, lane i of 16 sums elements
 * i mod 16 in index order; lanes are added pairwise (8, 4, 2, 1); blocks are added in index order.
 * Independent of isa and threads. sum_squares may be NULL. */
enum { TM_NORM_BLOCK = 65536, TM_MAX_PARTS = 64 };
int tm_reduce(tm_pool *pool, uint32_t isa, size_t n, const tm_reduction *reduction,
              double *sum_squares);

/* cffi-end */

#endif
