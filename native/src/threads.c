/* threads.c: the backend of pread and pwrite on threads, for where asynchronous I/O is forbidden.
 *
 * [Note: number of threads] One transfer occupies one thread, so there are as many threads as the
 * queue is deep, up to MAX_THREADS; what is beyond waits in the order of submission. On a drive of
 * 3 GB/s 4 to 8 threads moved as much as 16 or 32, with a quarter less processor time per byte.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine.h"

enum { MAX_THREADS = 8 };

typedef struct {
  pthread_mutex_t mutex; /* of everything below but threads */
  pthread_cond_t work, changed;
  uint32_t depth;
  tm_transfer *waiting; /* a ring of depth: first .. first + num_waiting */
  uint32_t first, num_waiting;
  tm_completion *ended; /* num_ended of them, not yet reaped */
  uint32_t num_ended;
  bool woken, closing;
  uint32_t num_threads;
  pthread_t threads[MAX_THREADS];
} threads_state;

/* No signal interrupts it: the engine's threads have them all blocked. */
static int64_t move(const tm_transfer *transfer) {
  ssize_t count =
      transfer->op == TM_OP_READ
          ? pread(transfer->fd, transfer->buffer, transfer->length, (off_t)transfer->offset)
          : pwrite(transfer->fd, transfer->buffer, transfer->length, (off_t)transfer->offset);
  return count < 0 ? -errno : count;
}

static void *worker_main(void *argument) {
  threads_state *state = argument;
  pthread_mutex_lock(&state->mutex);
  for (;;) {
    while (!state->num_waiting && !state->closing) pthread_cond_wait(&state->work, &state->mutex);
    if (!state->num_waiting) break;
    tm_transfer transfer = state->waiting[state->first];
    state->first = (state->first + 1) % state->depth;
    state->num_waiting--;
    pthread_mutex_unlock(&state->mutex);
    int64_t result = move(&transfer);
    pthread_mutex_lock(&state->mutex);
    state->ended[state->num_ended++] = (tm_completion){transfer.slot, result};
    if (state->num_ended == 1) pthread_cond_signal(&state->changed);
  }
  pthread_mutex_unlock(&state->mutex);
  return NULL;
}

static void threads_release(threads_state *state) {
  free(state->waiting);
  free(state->ended);
  free(state);
}

static void threads_teardown(void *opaque) {
  threads_state *state = opaque;
  pthread_mutex_lock(&state->mutex);
  state->closing = true;
  pthread_cond_broadcast(&state->work);
  pthread_mutex_unlock(&state->mutex);
  for (uint32_t i = 0; i < state->num_threads; i++) pthread_join(state->threads[i], NULL);
  pthread_cond_destroy(&state->changed);
  pthread_cond_destroy(&state->work);
  pthread_mutex_destroy(&state->mutex);
  threads_release(state);
}

static int threads_setup(uint32_t depth, void **out) {
  int rc = 0;
  threads_state *state = calloc(1, sizeof *state);
  if (!state) return -ENOMEM;
  state->depth = depth;
  state->waiting = calloc(depth, sizeof *state->waiting);
  state->ended = calloc(depth, sizeof *state->ended);
  if (!state->waiting || !state->ended) {
    threads_release(state);
    return -ENOMEM;
  }
  pthread_mutex_init(&state->mutex, NULL);
  pthread_cond_init(&state->work, NULL);
  pthread_cond_init(&state->changed, NULL);
  uint32_t wanted = depth < MAX_THREADS ? depth : MAX_THREADS;
  while (state->num_threads < wanted && !rc) {
    rc = tm_thread_start(&state->threads[state->num_threads], "tm-io-worker", worker_main, state);
    if (!rc) state->num_threads++;
  }
  if (!state->num_threads) {
    threads_teardown(state);
    return rc;
  }
  *out = state; /* fewer threads than wanted are slower, not wrong */
  return 0;
}

static int threads_submit(void *opaque, const tm_transfer *const *transfers, uint32_t count) {
  threads_state *state = opaque;
  pthread_mutex_lock(&state->mutex);
  for (uint32_t i = 0; i < count; i++) {
    state->waiting[(state->first + state->num_waiting++) % state->depth] = *transfers[i];
    pthread_cond_signal(&state->work);
  }
  pthread_mutex_unlock(&state->mutex);
  return (int)count;
}

static int threads_reap(void *opaque, tm_completion *completions, uint32_t max) {
  threads_state *state = opaque;
  uint32_t count = 0;
  pthread_mutex_lock(&state->mutex);
  while (!state->num_ended && !state->woken) pthread_cond_wait(&state->changed, &state->mutex);
  state->woken = false;
  while (state->num_ended && count < max) completions[count++] = state->ended[--state->num_ended];
  pthread_mutex_unlock(&state->mutex);
  return (int)count;
}

static uint32_t threads_num_ended(void *opaque) {
  threads_state *state = opaque;
  pthread_mutex_lock(&state->mutex);
  uint32_t count = state->num_ended;
  pthread_mutex_unlock(&state->mutex);
  return count;
}

static void threads_wake(void *opaque) {
  threads_state *state = opaque;
  pthread_mutex_lock(&state->mutex);
  state->woken = true;
  pthread_cond_signal(&state->changed);
  pthread_mutex_unlock(&state->mutex);
}

/* The child has no such threads, and the mutex may have been held at the fork. */
static void threads_abandon(void *opaque) { threads_release(opaque); }

const tm_backend tm_backend_threads = {
    .name = "threads",
    .setup = threads_setup,
    .submit = threads_submit,
    .reap = threads_reap,
    .wake = threads_wake,
    .num_ended = threads_num_ended,
    .teardown = threads_teardown,
    .abandon = threads_abandon,
};
