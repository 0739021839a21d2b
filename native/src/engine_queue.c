/* engine_queue.c: one storage path: its thread, what waits for it, its life. Chunks: engine_chunk.c.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>

#include "engine_queue.h"

/* ---- the thread -------------------------------------------------------------------------- */

/* For the rest of a request that had begun, its last chunk finishes it. */
static void end_list(tm_list *list, int32_t status) {
  tm_request *request;
  while ((request = tm_list_pop(list))) {
    request->queued = false;
    tm_request_note(request, status, request->issued, 0);
    if (request->outstanding == 0) tm_request_finish(request);
  }
}

static void end_waiting(tm_queue *queue, int32_t status) {
  for (uint32_t priority = 0; priority < TM_NUM_PRIORITIES; priority++)
    for (uint32_t op = 0; op < TM_NUM_OPS; op++) end_list(&queue->lists[priority][op], status);
}

static bool take_incoming(tm_queue *queue) {
  pthread_mutex_lock(&queue->mutex);
  tm_request *request = queue->incoming.head;
  bool closing = queue->closing;
  bool cancelling = queue->cancelling;
  tm_list doomed = queue->doomed;
  queue->incoming = queue->doomed = (tm_list){NULL, NULL};
  queue->cancelling = queue->wakes[TM_OP_READ] = queue->wakes[TM_OP_WRITE] = false;
  pthread_mutex_unlock(&queue->mutex);
  if (cancelling) end_waiting(queue, -ECANCELED);
  end_list(&doomed, -ECANCELED);
  while (request) {
    tm_request *next = request->next;
    tm_list_push(tm_queue_list_of(queue, request), request);
    request = next;
  }
  return closing;
}

/* False where something has come in meanwhile. See [Note: wakes]. */
static bool may_sleep(tm_queue *queue) {
  pthread_mutex_lock(&queue->mutex);
  bool is_empty = !queue->incoming.head;
  for (uint32_t op = 0; op < TM_NUM_OPS && is_empty; op++)
    queue->wakes[op] = queue->taken[op] < queue->depth[op];
  pthread_mutex_unlock(&queue->mutex);
  return is_empty;
}

static bool is_idle(tm_queue *queue) {
  return !queue->taken[TM_OP_READ] && !queue->taken[TM_OP_WRITE] &&
         !tm_queue_next_request(queue, TM_OP_READ) && !tm_queue_next_request(queue, TM_OP_WRITE);
}

/* Ends everything with the error of a backend that can no longer say what has ended. */
static void fail(tm_queue *queue, int32_t status) {
  pthread_mutex_lock(&queue->mutex);
  queue->failure = status; /* nothing comes in after this */
  pthread_mutex_unlock(&queue->mutex);
  take_incoming(queue);
  end_waiting(queue, status);
  tm_queue_fail_chunks(queue, status);
}

static int reap(tm_queue *queue) {
  if (queue->reap_error) return queue->reap_error;
  uint32_t depth = queue->depth[TM_OP_READ] + queue->depth[TM_OP_WRITE];
  int num = queue->backend->reap(queue->state, queue->completions, depth);
  queue->reaped_ns = tm_now_ns();
  return num;
}

static void *queue_main(void *argument) {
  tm_queue *queue = argument;
  for (;;) {
    bool closing = take_incoming(queue);
    tm_queue_cut_chunks(queue);
    tm_queue_submit_ready(queue);
    if (is_idle(queue)) {
      if (closing) break;
    } else if (!queue->in_kernel) {
      continue; /* injected or refused chunks were settled; more are to be cut */
    }
    if (!may_sleep(queue)) continue;
    int num = reap(queue);
    if (num < 0) {
      fail(queue, num);
      break;
    }
    tm_queue_complete(queue, (uint32_t)num);
  }
  return NULL;
}

int tm_thread_start(pthread_t *thread, const char *name, void *(*entry)(void *), void *argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int rc = -pthread_create(thread, NULL, entry, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!rc) pthread_setname_np(*thread, name);
  return rc;
}

/* ---- life cycle -------------------------------------------------------------------------- */

static bool are_valid(const tm_queue_options *options) {
  return options->chunk_bytes && options->chunk_bytes % TM_BLOCK == 0 &&
         options->chunk_bytes <= TM_MAX_CHUNK_BYTES && options->read_depth &&
         options->write_depth && options->read_depth <= TM_MAX_DEPTH &&
         options->write_depth <= TM_MAX_DEPTH;
}

static void release(tm_queue *queue) {
  free(queue->chunks);
  free(queue->ready);
  free(queue->batch);
  free(queue->completions);
  free(queue);
}

int tm_queue_create(const tm_backend *backend, const tm_queue_options *options,
                    tm_fault_point *faults, tm_queue **out) {
  int rc = -EINVAL;
  tm_queue *queue = NULL;
  if (!are_valid(options)) goto out;
  rc = -ENOMEM;
  queue = calloc(1, sizeof *queue);
  if (!queue) goto out;
  uint32_t depth = options->read_depth + options->write_depth;
  queue->backend = backend;
  queue->options = *options;
  queue->faults = faults;
  queue->depth[TM_OP_READ] = options->read_depth;
  queue->depth[TM_OP_WRITE] = options->write_depth;
  queue->chunks = calloc(depth, sizeof *queue->chunks);
  queue->ready = calloc(depth, sizeof *queue->ready);
  queue->batch = calloc(depth, sizeof *queue->batch);
  queue->completions = calloc(depth, sizeof *queue->completions);
  if (!queue->chunks || !queue->ready || !queue->batch || !queue->completions) goto out;
  for (uint32_t i = depth; i-- > 0;) {
    queue->chunks[i].transfer.slot = i;
    queue->chunks[i].next_free = queue->free_chunks;
    queue->free_chunks = &queue->chunks[i];
  }
  rc = backend->setup(depth, &queue->state);
  if (rc) goto out;
  pthread_mutex_init(&queue->mutex, NULL);
  rc = tm_thread_start(&queue->thread, "tm-io", queue_main, queue);
  if (rc) {
    pthread_mutex_destroy(&queue->mutex);
    backend->teardown(queue->state);
  }
out:
  if (rc && queue) release(queue);
  if (!rc) *out = queue;
  return rc;
}

int tm_queue_push(tm_queue *queue, tm_list requests) {
  for (tm_request *request = requests.head; request; request = request->next)
    request->queued = true; /* nobody else sees them yet */
  pthread_mutex_lock(&queue->mutex);
  int rc = queue->closing ? -ESHUTDOWN : queue->failure;
  if (!rc) {
    bool wakes = false;
    for (tm_request *request = requests.head; request; request = request->next)
      wakes = wakes || queue->wakes[request->io.op];
    tm_list_append(&queue->incoming, requests);
    /* One wake is enough until the thread has come by. Under the mutex, because close tears the
     * backend down once no push can be here any more. */
    if (wakes) {
      queue->wakes[TM_OP_READ] = queue->wakes[TM_OP_WRITE] = false;
      queue->backend->wake(queue->state);
    }
  }
  pthread_mutex_unlock(&queue->mutex);
  return rc;
}

void tm_queue_cancel(tm_queue *queue) {
  pthread_mutex_lock(&queue->mutex);
  queue->cancelling = true;
  tm_list_append(&queue->doomed, queue->incoming);
  queue->incoming = (tm_list){NULL, NULL};
  queue->backend->wake(queue->state);
  pthread_mutex_unlock(&queue->mutex);
}

/* The caller serialises calls of close, and those with calls of cancel. */
void tm_queue_close(tm_queue *queue) {
  if (queue->joined) return;
  pthread_mutex_lock(&queue->mutex);
  queue->closing = true;
  pthread_mutex_unlock(&queue->mutex);
  queue->backend->wake(queue->state);
  pthread_join(queue->thread, NULL);
  queue->backend->teardown(queue->state);
  queue->joined = true;
}

void tm_queue_free(tm_queue *queue) {
  pthread_mutex_destroy(&queue->mutex);
  release(queue);
}

void tm_queue_abandon(tm_queue *queue) {
  if (!queue->joined) queue->backend->abandon(queue->state);
  release(queue);
}

tm_counters *tm_queue_counters(tm_queue *queue) { return &queue->counters; }

const tm_histogram *tm_queue_latency(tm_queue *queue, uint32_t op) { return &queue->latency[op]; }

void *tm_queue_backend_state(tm_queue *queue) { return queue->state; }
