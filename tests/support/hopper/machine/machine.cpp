// Runs a grid: threads as fibers, warps in an order drawn at random or the earliest or latest possible, what is asynchronous at any time in between.
#include <stdarg.h>
#include <stdio.h>

#include "memory.h"
#include "products.h"

namespace hopper {

Machine* machine;
Thread* current;
Place* place;

// ---- threads ---------------------------------------------------------------------------------------------------------
constexpr size_t STACK = 256 * 1024, FIRST = 8 * 1024;
constexpr u32 AT_ONCE = 2048;  // threads: further programs begin when those of the earlier ones have ended, as where a GPU is full

static char* stack(size_t number) {    // each with a page below that nobody may touch
    static std::vector<char*> stacks;
    while (stacks.size() <= number) {
        char* found = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(found, page(), PROT_NONE);
        stacks.push_back(found);
    }
    return stacks[number];
}
static void leave() {
    if (_setjmp(current->context) == 0) _longjmp(machine->scheduler, 1);
}
static void begin() {
    machine->kernel(machine->arguments);
    current->waits = ENDED;
    current->warp->ended++;
    current->program->ended++;
    _longjmp(machine->scheduler, 1);
}
void wait_for(Waits what) {
    current->waits = what;
    leave();
}
u32 draw() {                           // splitmix64
    u64 x = machine->random += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return (x ^ x >> 31) >> 32;
}
// Here another warp may come in between.
void preempt() {
    if (machine->timing == RANDOM && draw() % 64 == 0) leave();
}
void fail(const char* format, ...) {
    char text[512];
    va_list given;
    va_start(given, format);
    vsnprintf(text, sizeof(text), format, given);
    va_end(given);
    machine->error = text;
    _longjmp(machine->scheduler, 2);
}

static bool can_go_on(const Thread& t) {
    switch (t.waits) {
        case FOR_NOTHING: return true;
        case FOR_OTHERS:
            for (const Thread* other : t.warp->threads)
                if (other != &t && other->waits != FOR_OTHERS && can_go_on(*other)) return false;
            return true;
        case FOR_WARP: return t.warp->meetings != t.generation;
        case FOR_PHASE: return t.program->bars.at(t.bar).phases % 2 != t.parity;
        case FOR_NAMED: return t.program->named[t.bar].generation != t.generation;
        case FOR_CLUSTER: return t.program->cluster->generation != t.generation;
        case FOR_REGISTERS: return t.program->free_registers >= t.generation;
        case FOR_PRODUCTS: return t.warp->executed >= t.generation;
        case ENDED: return false;
    }
    return false;
}

// ---- registers -------------------------------------------------------------------------------------------------------
// A warp's share of the pool. Whoever takes waits until others have given.
static void set_registers(u32 count, bool is_more) {
    meet();
    Thread& t = *current;
    Warp& w = *t.warp;
    if (count % 8 || count < 24 || count > 256) fail("%u registers a thread", count);
    if (t.lane > 0 || w.registers == count) return;
    if (is_more != (count > w.registers)) fail("warp %u has %u registers a thread and asks for %u", w.index, w.registers, count);
    if (is_more) {
        t.generation = (count - w.registers) * WARP;
        if (t.program->free_registers < t.generation) wait_for(FOR_REGISTERS);
    }
    t.program->free_registers -= (count - w.registers) * WARP;
    w.registers = count;
    changed(*t.program);
}
void registers_give(u32 count) { set_registers(count, false); }
void registers_take(u32 count) {
    set_registers(count, true);
    meet();
}

u32 count_up(u32* at, u32 most) {
    preempt();
    const u32 old = *at;
    *at = old >= most ? 0 : old + 1;
    return old;
}
void check_aligned(const void* at, u32 bytes) {
    if ((size_t)at % bytes) fail("thread %u: %u bytes at %p", current->thread.x, bytes, at);
}

// ---- what happens next -----------------------------------------------------------------------------------------------
static void go_on(Thread& t) {
    current = &t;
    place = &t;
    t.waits = FOR_NOTHING;
    if (t.begun) _longjmp(t.context, 1);
    t.begun = true;
    setcontext(&t.first);
}
static bool is_ready(Warp& w) {
    if (w.seen == w.program->cluster->version || w.ended == WARP) return false;
    for (const Thread* t : w.threads)
        if (can_go_on(*t)) return true;
    w.seen = w.program->cluster->version;
    return false;
}
// Every thread of a warp, as far as it comes; after a thread that was stopped on its way the others still run.
static void run(Warp& w) {
    for (volatile bool again = true; again;) {
        again = false;
        for (volatile u32 i = 0; i < WARP; i++) {
            Thread& t = *w.threads[i];
            if (!can_go_on(t)) continue;
            const int left = _setjmp(machine->scheduler);
            if (left == 0) go_on(t);
            if (left == 2) return;
            if (t.waits == FOR_NOTHING) return;
            again = true;
        }
    }
}

static bool step_random() {
    Machine& m = *machine;
    u32 best = 0;
    Warp *runs = nullptr, *computes = nullptr;
    long copy = -1;
    const auto better = [&](u32 priority) { return priority >= best ? (best = priority, true) : false; };
    for (Warp* w : m.warps) {
        if (is_ready(*w) && better(w->priority)) runs = w, computes = nullptr;
        if (can_compute(*w) && better(w->product_priority)) computes = w, runs = nullptr;
    }
    for (size_t i = 0; i < m.copies.size(); i++)
        if (better(m.copies[i].priority)) copy = i, runs = computes = nullptr;
    if (draw() % 8 == 0) m.warps[draw() % m.warps.size()]->priority = draw();
    if (draw() % 8 == 0) m.warps[draw() % m.warps.size()]->product_priority = draw();
    if (runs) {
        run(*runs);
    } else if (computes) {
        compute_some(*computes, 1 + draw() % 16);
    } else if (copy >= 0) {
        const Copy c = m.copies[copy];
        m.copies.erase(m.copies.begin() + copy);
        deliver(c);
    } else {
        return false;
    }
    return true;
}
static bool copy_oldest() {
    Machine& m = *machine;
    if (m.copies.empty()) return false;
    const Copy c = m.copies.front();
    m.copies.pop_front();
    deliver(c);
    return true;
}
static bool compute_any() {
    for (Warp* w : machine->warps)
        if (can_compute(*w)) {
            compute_some(*w, ~0u);
            return true;
        }
    return false;
}
static bool run_any() {
    Machine& m = *machine;
    for (size_t i = 0; i < m.warps.size(); i++) {
        Warp& w = *m.warps[m.turn++ % m.warps.size()];
        if (!is_ready(w)) continue;
        run(w);
        return true;
    }
    return false;
}
static bool step() {
    switch (machine->timing) {
        case EAGER: return copy_oldest() || compute_any() || run_any();
        case LATE: return run_any() || copy_oldest() || compute_any();
        case RANDOM: return step_random();
    }
    return false;
}

// ---- a grid ----------------------------------------------------------------------------------------------------------
std::string name_of(u32 bar) {
    std::string found = "mbarrier " + std::to_string(bar);
    u32 nearest = 0;
    const u32 base = (machine->window + 1023) & ~1023u;
    for (const BarrierName* name = machine->names; name->name; name++) {
        const u32 at = base + name->at;
        if (at <= bar && at >= nearest && bar < at + 32) nearest = at, found = std::string(name->name) + "[" + std::to_string((bar - at) / 8) + "]";
    }
    return found;
}
static std::string what_for(const Thread& t) {
    switch (t.waits) {
        case FOR_PHASE: {
            const Mbarrier& b = t.program->bars.at(t.bar);
            return name_of(t.bar) + " (phase " + std::to_string(b.phases) + ", " + std::to_string(b.pending) + " of " + std::to_string(b.arrivals) +
                   " arrivals and " + std::to_string(b.bytes) + " bytes to come) to complete a phase of parity " + std::to_string(t.parity);
        }
        case FOR_NAMED: return "named barrier " + std::to_string(t.bar) + " (" + std::to_string(t.program->named[t.bar].arrived) + " threads have arrived)";
        case FOR_WARP: return "others of its warp";
        case FOR_CLUSTER: return "the cluster";
        case FOR_REGISTERS: return "registers";
        case FOR_PRODUCTS: return "products";
        default: return "nothing";
    }
}
static std::string state() {
    std::string text = "no thread can go on\n";
    for (auto& c : machine->clusters)
        for (auto& p : c->programs)
            for (Warpgroup& g : p->groups) {
                std::map<std::string, u32> waiting;
                for (const Thread& t : p->threads)
                    if (&p->groups[t.warp->group] == &g && t.waits != ENDED) waiting[what_for(t)]++;
                for (auto& [what, count] : waiting)
                    text += "  program " + std::to_string(p->index) + ", warpgroup " + std::to_string(&g - &p->groups[0]) + ": " + std::to_string(count) +
                            " threads wait for " + what + "\n";
            }
    return text;
}
static void check_end() {
    for (const Warp* w : machine->warps)
        if (w->ended < WARP) {
            machine->error = state();
            return;
        }
    for (const Copy& c : machine->copies) {  // stores end with the grid at the latest
        if (c.direction == LOAD) fail("the grid ends while a copy to %u is in flight", c.shared);
        deliver(c);
    }
    for (auto& c : machine->clusters)
        for (auto& p : c->programs) {
            for (u32 i = 0; i < NAMED; i++)
                if (p->named[i].arrived > 0) fail("program %u ends with %u arrivals at named barrier %u", p->index, p->named[i].arrived, i);
            for (const Thread& t : p->threads)
                if (t.warp->delivered < t.issued) fail("program %u: thread %u ends before its products", p->index, t.thread.x);
        }
}

static void add_program(Cluster& c, u32 index, u32 programs, u32 threads, u32 shared) {
    c.programs.push_back(std::make_unique<Program>());
    Program& p = *c.programs.back();
    p.cluster = &c, p.rank = c.programs.size() - 1, p.index = index;
    p.shared.resize(shared);
    for (u32 i = 0; i + 4 <= shared; i += 4) memcpy(&p.shared[i], &IN_FLIGHT, 4);
    p.blocks.resize((machine->window + shared) / BLOCK + 1);
    p.threads = std::vector<Thread>(threads);
    p.warps.resize(threads / WARP);
    p.groups.resize((threads + GROUP - 1) / GROUP);
    const u32 registers = REGISTERS / threads / 8 * 8;
    p.free_registers = REGISTERS - registers * threads;
    for (u32 i = 0; i < p.warps.size(); i++) {
        Warp& w = p.warps[i];
        w.program = &p, w.index = i, w.group = i * WARP / GROUP, w.registers = registers;
        w.slot = p.rank * (MOST_WARPS / 2) + i;
        w.priority = draw(), w.product_priority = draw();
        c.clocks[w.slot].at[w.slot] = 1;
        machine->warps.push_back(&w);
    }
    const size_t first = (machine->warps.size() - p.warps.size()) * WARP;
    for (u32 i = 0; i < threads; i++) {
        Thread& t = p.threads[i];
        t.thread = {i, 0, 0}, t.block = {index, 0, 0}, t.grid = {programs, 1, 1};
        t.program = &p, t.warp = &p.warps[i / WARP], t.lane = i % WARP;
        t.warp->threads.push_back(&t);
        getcontext(&t.first);
        t.stack = stack(first + i);
        memset(t.stack + STACK - FIRST, 0xff, FIRST);  // what nobody has set is NaN
        t.first.uc_stack.ss_sp = t.stack;
        t.first.uc_stack.ss_size = STACK;
        t.first.uc_link = nullptr;
        makecontext(&t.first, begin, 0);
    }
}

// Runs a grid to its end. Gives what went wrong, or nothing; the text is good until the next call.
extern "C" __attribute__((visibility("default"))) const char* run_grid(
    void (*kernel)(const void*), const void* arguments, const BarrierName* names, u32 window, bool reads_early, u32 programs, u32 threads, u32 shared, u32 cluster,
    int timing, u64 seed) {
    static std::string said;
    Machine m;
    machine = &m;
    const Guard guard;
    m.timing = (Timing)timing, m.random = seed, m.kernel = kernel, m.arguments = arguments, m.names = names, m.window = window, m.reads_early = reads_early;
    for (u32 i = 0; i < programs && m.error.empty();) {
        m.clusters.clear(), m.warps.clear(), m.copies.clear();
        do {
            if (i % cluster == 0) m.clusters.push_back(std::make_unique<Cluster>());
            add_program(*m.clusters.back(), i++, programs, threads, shared);
        } while (i < programs && (i % cluster > 0 || (m.warps.size() * WARP + cluster * threads) <= AT_ONCE));
        for (volatile bool more = true; more && m.error.empty();)
            if (_setjmp(m.scheduler) == 0) more = step();
        if (m.error.empty() && _setjmp(m.scheduler) == 0) check_end();
    }
    said = m.error;
    return said.empty() ? nullptr : said.c_str();
}

}  // namespace hopper
