/* engine_copy.c: the copy queue: memory to memory, first in first out, on one thread. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

/* The counters move this often during a long copy. */
enum { COPY_CHUNK = 4 << 20 };

struct tm_copier {
  tm_counters counters;
  pthread_t thread;
  bool joined;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  tm_list incoming; /* under mutex, like closing */
  bool closing;
};

static void copy(tm_copier *copier, tm_request *request) {
  const tm_io *io = &request->io;
  for (uint64_t at = 0; at < io->length; at += COPY_CHUNK) {
    uint64_t num = io->length - at < COPY_CHUNK ? io->length - at : COPY_CHUNK;
    memcpy((char *)io->buffer + at, (const char *)request->source + at, num);
    atomic_fetch_add_explicit(&copier->counters.copied_bytes, num, memory_order_relaxed);
  }
  tm_request_note(request, 0, 0, io->length);
  tm_request_finish(request);
}

static void *copier_main(void *argument) {
  tm_copier *copier = argument;
  tm_request *request;
  do {
    pthread_mutex_lock(&copier->mutex);
    while (!copier->incoming.head && !copier->closing)
      pthread_cond_wait(&copier->changed, &copier->mutex);
    request = tm_list_pop(&copier->incoming);
    pthread_mutex_unlock(&copier->mutex);
    if (request) copy(copier, request);
  } while (request);
  return NULL;
}

int tm_copier_create(tm_copier **out) {
  tm_copier *copier = calloc(1, sizeof *copier);
  if (!copier) return -ENOMEM;
  pthread_mutex_init(&copier->mutex, NULL);
  pthread_cond_init(&copier->changed, NULL);
  int rc = tm_thread_start(&copier->thread, "tm-copy", copier_main, copier);
  if (rc)
    tm_copier_free(copier);
  else
    *out = copier;
  return rc;
}

int tm_copier_push(tm_copier *copier, tm_request *request) {
  pthread_mutex_lock(&copier->mutex);
  bool closing = copier->closing;
  if (!closing) {
    tm_list_push(&copier->incoming, request);
    pthread_cond_signal(&copier->changed);
  }
  pthread_mutex_unlock(&copier->mutex);
  return closing ? -ESHUTDOWN : 0;
}

void tm_copier_close(tm_copier *copier) {
  if (copier->joined) return;
  pthread_mutex_lock(&copier->mutex);
  copier->closing = true;
  pthread_cond_signal(&copier->changed);
  pthread_mutex_unlock(&copier->mutex);
  pthread_join(copier->thread, NULL);
  copier->joined = true;
}

void tm_copier_free(tm_copier *copier) {
  pthread_cond_destroy(&copier->changed);
  pthread_mutex_destroy(&copier->mutex);
  free(copier);
}

void tm_copier_abandon(tm_copier *copier) { free(copier); }

tm_counters *tm_copier_counters(tm_copier *copier) { return &copier->counters; }
