/* engine.h: what the parts of the I/O engine share. Private; the interface is tiermem.h.
 *
 * Layers: engine.c (handles, life cycle) over engine_queue.c (one thread per path, priorities) and
 * engine_chunk.c (chunks, depth limits, faults, latencies) over a backend (aio.c, uring.c, threads.c),
 * which only moves chunks.
 * A backend is the functions of tm_backend; it knows neither requests nor priorities nor faults.
 */
#ifndef TM_ENGINE_H
#define TM_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "tiermem.h"

enum { TM_NUM_OPS = 2, TM_NUM_PRIORITIES = 2, TM_MAX_QUEUES = 256, TM_BLOCK = 4096 };
#define TM_MAX_CHUNK_BYTES ((uint64_t)1 << 30) /* the kernel moves at most 2 GiB - 4 KiB a call */
#define TM_MAX_DEPTH 4096u
enum { TM_MAX_RANGES = 8 }; /* of registered memory */

/* ---- backends ---------------------------------------------------------------------------- */

/* One system call's worth of transfer. slot is unique among those in flight (0 .. depth-1), so a
 * backend keeps its per-transfer memory in an array. */
typedef struct {
  uint32_t op;
  uint32_t slot;
  int32_t fd;
  uint32_t length;
  uint64_t offset;
  void *buffer;
} tm_transfer;

typedef struct {
  uint32_t slot;
  int64_t result; /* bytes, or -errno */
} tm_completion;

/* [Note: backend threading] submit and reap are called by the queue's thread only, wake by any
 * thread between setup and teardown, as the functions about memory; setup and teardown while that
 * thread does not run. */
typedef struct {
  const char *name;
  int (*setup)(uint32_t depth, void **state);
  /* How many of the first transfers were accepted (may be fewer), or -errno about the first. */
  int (*submit)(void *state, const tm_transfer *const *transfers, uint32_t count);
  /* Up to max completions. Sleeps until there is one or wake is called (then maybe 0). -errno: it
   * will not work again; nothing but num_ended and teardown follows. */
  int (*reap)(void *state, tm_completion *completions, uint32_t max);
  void (*wake)(void *state);
  /* After reap has failed for good: how many transfers have ended and were not reaped, as far as
   * memory shared with the kernel tells. */
  uint32_t (*num_ended)(void *state);
  void (*teardown)(void *state);
  void (*abandon)(void *state); /* in a forked child: release the copies, touch nothing shared */
  /* See tm_engine_register. All three NULL where a backend has no use for it. */
  int (*add_memory)(void *state, void *base, uint64_t length);
  void (*remove_memory)(void *state, void *base);
  void (*count_memory)(void *state, tm_memory_stats *total); /* adds */
} tm_backend;

extern const tm_backend tm_backend_libaio, tm_backend_io_uring, tm_backend_threads;

typedef struct {
  char *base; /* NULL: free */
  uint64_t length;
} tm_range;

/* ---- requests ---------------------------------------------------------------------------- */

/* [Note: request lifetime] Two references: the caller's (dropped by tm_request_free) and the
 * engine's (dropped after completion was signalled). A request never points back to its engine, so
 * the two may be freed in any order once the engine is closed. */
struct tm_request {
  tm_io io;             /* set before the request is shared */
  const void *source;   /* of a copy */
  pid_t pid;
  atomic_uint references;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  atomic_bool done;     /* written under mutex, after result */
  tm_result result;
  /* The rest belongs to the queue's thread once submitted. */
  tm_request *next;
  uint64_t issued;      /* bytes cut into chunks so far */
  uint32_t outstanding; /* chunks in flight */
  bool queued;          /* still in a list because chunks are left to cut */
};

int tm_request_create(const tm_io *io, tm_request **out);
void tm_request_note(tm_request *request, int32_t status, uint64_t at, uint64_t transferred);
void tm_request_finish(tm_request *request); /* signals, drops the engine's reference */
void tm_request_discard(tm_request *request); /* one that was never shared */

typedef struct {
  tm_request *head, *tail;
} tm_list;

void tm_list_push(tm_list *list, tm_request *request);
tm_request *tm_list_pop(tm_list *list);
void tm_list_append(tm_list *list, tm_list more);

/* ---- faults ------------------------------------------------------------------------------ */

typedef struct {
  pthread_mutex_t mutex;
  tm_fault armed;
  uint64_t seen; /* chunks of that op since arming */
} tm_fault_point;

/* Counts one new chunk; true if it is to be hit, and how. */
bool tm_fault_hits(tm_fault_point *point, uint32_t op, tm_fault *out);

/* ---- queues ------------------------------------------------------------------------------ */

/* Written by one thread, read by any. */
typedef struct {
  _Atomic uint64_t bytes[TM_NUM_OPS], chunks[TM_NUM_OPS];
  _Atomic uint64_t copied_bytes, submit_calls, retries, max_in_flight;
} tm_counters;

void tm_counters_add(tm_counters *counters, tm_engine_stats *total);

/* One queue's chunks of one operation; written by the queue's thread, read by any. */
typedef struct {
  _Atomic uint64_t sum_ns, buckets[TM_LATENCY_BUCKETS];
} tm_histogram;

uint64_t tm_now_ns(void); /* CLOCK_MONOTONIC */
uint32_t tm_latency_bucket(uint64_t ns);
void tm_histogram_count(tm_histogram *histogram, uint64_t ns);
void tm_histogram_read(const tm_histogram *histogram, tm_latency *out);

typedef struct tm_queue tm_queue;

int tm_queue_create(const tm_backend *backend, const tm_queue_options *options,
                    tm_fault_point *faults, tm_queue **out);
int tm_queue_push(tm_queue *queue, tm_list requests); /* all, or none: -ESHUTDOWN after close, -errno
                                                       * after a failure */
void tm_queue_cancel(tm_queue *queue);                   /* what has not begun: -ECANCELED */
void tm_queue_close(tm_queue *queue);                    /* drains, joins; idempotent */
void tm_queue_free(tm_queue *queue);                     /* after close */
void tm_queue_abandon(tm_queue *queue);                  /* instead of close and free, after fork */
tm_counters *tm_queue_counters(tm_queue *queue);
const tm_histogram *tm_queue_latency(tm_queue *queue, uint32_t op);
/* The state that the backend's functions about memory take; valid until close. */
void *tm_queue_backend_state(tm_queue *queue);

typedef struct tm_copier tm_copier;

int tm_copier_create(tm_copier **out);
int tm_copier_push(tm_copier *copier, tm_request *request);
void tm_copier_close(tm_copier *copier);
void tm_copier_free(tm_copier *copier);
void tm_copier_abandon(tm_copier *copier);
tm_counters *tm_copier_counters(tm_copier *copier);

/* Starts a thread with every signal blocked: handlers belong to the application's threads. */
int tm_thread_start(pthread_t *thread, const char *name, void *(*entry)(void *), void *argument);

#endif
