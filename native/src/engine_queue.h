/* engine_queue.h: one queue, as engine_queue.c (its thread and life) and engine_chunk.c (what is in
 * flight) share it. Private.
 *
 * [Note: ownership] Other threads touch only what is under `mutex`, the counters (atomic) and the
 * backend's wake. Everything else belongs to the queue's thread.
 *
 * [Note: wakes] A wake is a system call here and there, so a push wakes the thread only where it makes a
 * difference: when the thread sleeps, and has room for that operation. Without room it would have to
 * go back to sleep, and comes by anyway when a chunk ends. Nothing is lost between: before it
 * sleeps the thread looks at `incoming` and says what wakes it, in one critical section.
 */
#ifndef TM_ENGINE_QUEUE_H
#define TM_ENGINE_QUEUE_H

#include "engine.h"

typedef struct tm_chunk tm_chunk;
struct tm_chunk {
  tm_transfer transfer; /* what is left of it; slot is fixed */
  tm_request *request;
  uint64_t at;          /* where it starts within the request */
  uint64_t length;
  uint64_t moved;       /* bytes known to be done, from the start */
  uint64_t last_end;    /* where the last short transfer ended; UINT64_MAX at first */
  uint64_t shorten_to;  /* injected: the next transfer reports at most this; 0 = none */
  uint64_t submit_errors; /* injected: so many submissions fail with submit_errno */
  int32_t submit_errno;
  uint64_t started_ns;  /* when the backend first accepted it; 0: not yet */
  uint32_t resubmits;   /* completions with EINTR or EAGAIN */
  bool partial;         /* injected: its batch is cut after the first chunk */
  tm_chunk *next_free;
};

struct tm_queue {
  const tm_backend *backend;
  void *state;
  tm_queue_options options;
  tm_fault_point *faults;
  tm_counters counters;
  tm_histogram latency[TM_NUM_OPS];
  pthread_t thread;
  bool joined;

  pthread_mutex_t mutex;
  tm_list incoming;
  bool wakes[TM_NUM_OPS]; /* the thread sleeps, or is about to, and has room for one more */
  bool closing;
  bool cancelling; /* the thread is to end what it has not begun, and `doomed` */
  tm_list doomed;  /* what was incoming then; what comes later is not cancelled */
  int32_t failure; /* 0, or -errno with which the backend failed for good; pushes get it, too */

  /* Of the thread. */
  tm_list lists[TM_NUM_PRIORITIES][TM_NUM_OPS];
  tm_chunk *chunks;
  tm_chunk *free_chunks;
  uint32_t depth[TM_NUM_OPS], taken[TM_NUM_OPS]; /* taken: cut and not settled */
  uint32_t in_kernel;
  tm_chunk **ready; /* cut or to be continued, not yet accepted by the backend */
  const tm_transfer **batch;
  uint32_t num_ready;
  uint32_t backoff; /* refused submissions in a row with nothing in flight */
  tm_completion *completions;
  uint64_t reaped_ns; /* when the completions being handled were fetched */
  int32_t reap_error; /* injected: -errno of every reap from now on; 0 = none */
};

/* All by the queue's thread. */
void tm_queue_cut_chunks(tm_queue *queue);   /* as many as the depths allow */
void tm_queue_submit_ready(tm_queue *queue); /* as many as the backend takes */
void tm_queue_complete(tm_queue *queue, uint32_t num); /* the first of queue->completions */
/* Settles with this status all that was cut: what the kernel has not got at once, the rest when it has
 * ended there, since the kernel may write to a request's memory until then. */
void tm_queue_fail_chunks(tm_queue *queue, int32_t status);

static inline tm_list *tm_queue_list_of(tm_queue *queue, const tm_request *request) {
  return &queue->lists[request->io.priority][request->io.op];
}

static inline tm_request *tm_queue_next_request(tm_queue *queue, uint32_t op) {
  tm_request *request = queue->lists[TM_PRIORITY_DEMAND][op].head;
  return request ? request : queue->lists[TM_PRIORITY_BACKGROUND][op].head;
}

#endif
