// The threads that kernels run on: torch's own OpenMP team if there is one (its threads still spin after torch's last operation and would compete for the
// cores), else a pool of waiting threads. One pool serves every kernel of the process.
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#include <cstdint>

typedef int64_t i64;
typedef void (*Body)(void* context, i64 item);

namespace {

constexpr int MAX_THREADS = 1024, SPINS = 2000;

struct Pool {
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    Body body;
    void* context;
    i64 items, next;
    i64 generation;     // of the current work
    int workers;        // threads created
    int wanted;         // workers that take part
    int running;        // workers that have not finished this generation
    bool busy;
    pid_t owner;        // a forked child does not inherit the threads
};

Pool pool;
pthread_mutex_t entrance = PTHREAD_MUTEX_INITIALIZER;

void drain() {
    for (;;) {
        const i64 item = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED);
        if (item >= pool.items) return;
        pool.body(pool.context, item);
    }
}

void* work(void* number) {
    const int me = (int)(intptr_t)number;
    i64 seen = 0;
    pthread_mutex_lock(&pool.mutex);
    for (;;) {
        while (pool.generation == seen) pthread_cond_wait(&pool.wake, &pool.mutex);
        seen = pool.generation;
        if (me >= pool.wanted) continue;
        pthread_mutex_unlock(&pool.mutex);
        drain();
        pthread_mutex_lock(&pool.mutex);
        if (__atomic_sub_fetch(&pool.running, 1, __ATOMIC_ACQ_REL) == 0) pthread_cond_signal(&pool.done);
    }
    return nullptr;
}

void reset_pool() {
    pool = Pool{};
    pthread_mutex_init(&pool.mutex, nullptr);
    pthread_cond_init(&pool.wake, nullptr);
    pthread_cond_init(&pool.done, nullptr);
    pool.owner = getpid();
}

void after_fork() {  // the parent may have held the lock when it forked
    entrance = PTHREAD_MUTEX_INITIALIZER;
    pool.owner = 0;
}

bool enter() {
    static bool registered = false;
    pthread_mutex_lock(&entrance);
    if (!registered) {
        pthread_atfork(nullptr, nullptr, after_fork);
        registered = true;
    }
    if (pool.owner != getpid()) reset_pool();
    const bool free = !pool.busy;
    if (free) pool.busy = true;
    pthread_mutex_unlock(&entrance);
    return free;
}

void leave() {
    pthread_mutex_lock(&entrance);
    pool.busy = false;
    pthread_mutex_unlock(&entrance);
}

// -- torch's threads ---------------------------------------------------------------------------------------------------

typedef void (*Team)(void (*body)(void*), void* context, unsigned threads, unsigned flags);  // libgomp's GOMP_parallel

Team team;
pid_t team_owner;  // OpenMP does not survive a fork

struct Job {
    Body body;
    void* context;
    i64 items, next;
};

void run_items(void* context) {
    Job& job = *(Job*)context;
    for (;;) {
        const i64 item = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
        if (item >= job.items) return;
        job.body(job.context, item);
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void tilewise_use_team(void* function) {
    team = (Team)function;
    team_owner = getpid();
}

// Calls body(context, item) for every item from 0; items start in order. While the pool is busy, a second caller runs its items by itself.
extern "C" __attribute__((visibility("default"))) void tilewise_run(Body body, void* context, i64 items, i64 threads) {
    if (threads > items) threads = items;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > 1 && team && team_owner == getpid()) {
        Job job{body, context, items, 0};
        team(run_items, &job, (unsigned)threads, 0);
        return;
    }
    if (threads <= 1 || !enter()) {
        for (i64 item = 0; item < items; item++) body(context, item);
        return;
    }
    pthread_mutex_lock(&pool.mutex);
    while (pool.workers < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, work, (void*)(intptr_t)pool.workers) != 0) break;
        pthread_detach(thread);
        pool.workers++;
    }
    pool.body = body;
    pool.context = context;
    pool.items = items;
    pool.next = 0;
    pool.wanted = pool.workers < threads - 1 ? pool.workers : (int)threads - 1;
    pool.running = pool.wanted;
    pool.generation++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.mutex);
    drain();
    for (int spin = 0; spin < SPINS && __atomic_load_n(&pool.running, __ATOMIC_ACQUIRE) != 0; spin++) sched_yield();
    pthread_mutex_lock(&pool.mutex);
    while (pool.running != 0) pthread_cond_wait(&pool.done, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
    leave();
}
