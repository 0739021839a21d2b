/* engine_request.c: one transfer's state, lists of them, and the fault point. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"

int tm_request_create(const tm_io *io, tm_request **out) {
  pthread_condattr_t attributes;
  tm_request *request = calloc(1, sizeof *request);
  if (!request) return -ENOMEM;
  request->io = *io;
  request->pid = getpid();
  atomic_init(&request->references, 2);
  atomic_init(&request->done, false);
  pthread_mutex_init(&request->mutex, NULL);
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&request->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  *out = request;
  return 0;
}

void tm_request_discard(tm_request *request) {
  pthread_cond_destroy(&request->changed);
  pthread_mutex_destroy(&request->mutex);
  free(request);
}

static void request_unref(tm_request *request) {
  if (atomic_fetch_sub_explicit(&request->references, 1, memory_order_acq_rel) == 1)
    tm_request_discard(request);
}

/* Chunks complete in any order; the failure that is reported is the one at the lowest offset. */
void tm_request_note(tm_request *request, int32_t status, uint64_t at, uint64_t transferred) {
  tm_result *result = &request->result;
  result->transferred += transferred;
  if (status < 0 && (result->status == 0 || at < result->failed_at)) {
    result->status = status;
    result->failed_at = at;
  }
}

void tm_request_finish(tm_request *request) {
  pthread_mutex_lock(&request->mutex);
  atomic_store_explicit(&request->done, true, memory_order_release);
  pthread_mutex_unlock(&request->mutex);
  /* After the unlock, or those it wakes go to sleep again on the mutex. Our reference keeps it. */
  pthread_cond_broadcast(&request->changed);
  request_unref(request);
}

static struct timespec deadline_after(int64_t timeout_ns) {
  enum { SECOND = 1000000000 };
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  at.tv_sec += (time_t)(timeout_ns / SECOND);
  at.tv_nsec += (long)(timeout_ns % SECOND);
  if (at.tv_nsec >= SECOND) {
    at.tv_nsec -= SECOND;
    at.tv_sec++;
  }
  return at;
}

int tm_request_wait(tm_request *request, int64_t timeout_ns) {
  int rc = 0;
  struct timespec deadline;
  if (atomic_load_explicit(&request->done, memory_order_acquire)) return 0;
  /* After fork the thread that would complete it exists only in the parent, and the mutex may
   * have been held: never touch it. */
  if (request->pid != getpid()) return -ECHILD;
  if (timeout_ns == 0) return -ETIMEDOUT;
  if (timeout_ns > 0) deadline = deadline_after(timeout_ns);
  pthread_mutex_lock(&request->mutex);
  while (!atomic_load_explicit(&request->done, memory_order_relaxed) && rc == 0) {
    if (timeout_ns < 0)
      pthread_cond_wait(&request->changed, &request->mutex);
    else
      rc = -pthread_cond_timedwait(&request->changed, &request->mutex, &deadline);
  }
  if (atomic_load_explicit(&request->done, memory_order_relaxed)) rc = 0;
  pthread_mutex_unlock(&request->mutex);
  return rc;
}

int tm_request_result(tm_request *request, tm_result *out) {
  if (!atomic_load_explicit(&request->done, memory_order_acquire)) return -EBUSY;
  *out = request->result;
  return 0;
}

void tm_request_free(tm_request *request) {
  if (!request) return;
  if (request->pid != getpid()) {
    /* The child's copy. One in flight at the fork is still in its (dead) queue's lists, which
     * nothing walks any more. Mutex and condition may be in use by nobody: only free. */
    free(request);
    return;
  }
  tm_request_wait(request, -1);
  request_unref(request);
}

void tm_list_push(tm_list *list, tm_request *request) {
  request->next = NULL;
  if (list->tail)
    list->tail->next = request;
  else
    list->head = request;
  list->tail = request;
}

tm_request *tm_list_pop(tm_list *list) {
  tm_request *request = list->head;
  if (request) {
    list->head = request->next;
    if (!list->head) list->tail = NULL;
    request->next = NULL;
  }
  return request;
}

void tm_list_append(tm_list *list, tm_list more) {
  if (!more.head) return;
  if (list->tail)
    list->tail->next = more.head;
  else
    list->head = more.head;
  list->tail = more.tail;
}

bool tm_fault_hits(tm_fault_point *point, uint32_t op, tm_fault *out) {
  bool hit = false;
  pthread_mutex_lock(&point->mutex);
  tm_fault *armed = &point->armed;
  if (armed->repeat > 0 && armed->op == op && point->seen++ >= armed->nth) {
    hit = true;
    *out = *armed;
    /* A refused submission is retried, so its repeats all go to the one chunk's attempts. */
    armed->repeat = armed->kind == TM_FAULT_SUBMIT_ERROR ? 0 : armed->repeat - 1;
  }
  pthread_mutex_unlock(&point->mutex);
  return hit;
}
