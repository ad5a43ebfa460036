// Meetings of a warp, named barriers, the cluster's barrier and mbarriers.
#pragma once
#include "state.h"

namespace hopper {

// ---- warps -----------------------------------------------------------------------------------------------------------
inline u32 meet(Meeting kind, u32 value, u32 lane) {
    Thread& t = *current;
    Warp& w = *t.warp;
    if (w.met > 0 && w.meeting != kind) fail("lanes of warp %u are at different instructions", w.index);
    w.meeting = kind;
    w.given[t.lane] = value;
    w.lane[t.lane] = lane % WARP;
    if (++w.met < WARP) {
        t.generation = w.meetings;
        wait_for(FOR_WARP);
        return w.result[t.lane];
    }
    u32 some = 0;
    for (u32 value : w.given) some |= value;
    for (u32 i = 0; i < WARP; i++) w.result[i] = kind == SHUFFLE ? w.given[w.lane[i]] : some;
    w.met = 0;
    w.meetings++;
    changed(*t.program);
    return w.result[t.lane];
}
u32 shuffle(u32 value, u32 lane) { return meet(SHUFFLE, value, lane); }
u32 any_bits(u32 value) { return meet(ANY, value, 0); }
void meet() { meet(MEET, 0, 0); }
void let_others_come() { wait_for(FOR_OTHERS); }

// ---- clocks ----------------------------------------------------------------------------------------------------------
inline void release_to(Clock& to) {
    const Warp& w = *current->warp;
    to.join(clock_of(w));
    clock_of(w).at[w.slot]++;
}
inline void acquire(const Clock& from) { clock_of(*current->warp).join(from); }

// ---- named barriers --------------------------------------------------------------------------------------------------
inline void arrive(u32 id, u32 threads) {
    Thread& t = *current;
    Program& p = *t.program;
    if (id >= NAMED) fail("named barrier %u: there are %u", id, NAMED);
    Named& b = p.named[id];
    if (b.arrived > 0 && b.threads != threads) fail("named barrier %u: for %u threads, and for %u", id, b.threads, threads);
    b.threads = threads;
    b.who.resize(p.threads.size());
    if (b.who[t.thread.x]) fail("named barrier %u: thread %u arrives again before the others have", id, t.thread.x);
    b.who[t.thread.x] = true;
    release_to(b.arriving);
    if (++b.arrived < threads) return;
    b.who.assign(p.threads.size(), false);
    b.arrived = 0;
    b.completed = b.arriving;
    b.generation++;
    changed(p);
}
void barrier_arrive(u32 id, u32 threads) {
    arrive(id, threads);
    preempt();
}
void barrier_sync(u32 id, u32 threads) {
    preempt();
    Named& b = current->program->named[id % NAMED];
    current->bar = id, current->generation = b.generation;
    arrive(id, threads);
    wait_for(FOR_NAMED);
    acquire(b.completed);
}
void barrier_of_all(u32 id) { barrier_sync(id, current->program->threads.size()); }

// ---- the cluster -----------------------------------------------------------------------------------------------------
u32 cluster_rank() { return current->program->rank; }
void cluster_arrive() {
    Cluster& c = *current->program->cluster;
    current->generation = c.generation;
    release_to(c.arriving);
    if (++c.arrived < c.programs.size() * c.programs[0]->threads.size()) return;
    c.arrived = 0;
    c.completed = c.arriving;
    c.generation++;
    changed(*current->program);
}
void cluster_wait() {
    wait_for(FOR_CLUSTER);
    acquire(current->program->cluster->completed);
}

inline void check_range(const Program& p, u32 address, u32 bytes) {
    const size_t end = machine->window + p.shared.size();
    if (address < machine->window || address + bytes > end) fail("shared memory from %u to %u is used, it ends at %zu", address, address + bytes, end);
}

// ---- mbarriers -------------------------------------------------------------------------------------------------------
u32 window() { return machine->window; }
u32 of_program(u32 address, u32 rank) { return address + (rank + 1) * REMOTE; }

inline Program& program_at(u32 address) {
    Program& own = *current->program;
    if (address < REMOTE) return own;
    const u32 rank = address / REMOTE - 1;
    if (rank >= own.cluster->programs.size()) fail("program %u of a cluster of %zu is addressed", rank, own.cluster->programs.size());
    return *own.cluster->programs[rank];
}
inline Mbarrier& bar_at(Program& p, u32 address, bool from_outside) {
    auto found = p.bars.find(address);
    if (found == p.bars.end()) fail("there is no mbarrier at %u", address);
    const Mbarrier& b = found->second;
    const bool is_there = b.time <= clock_of(*current->warp).at[b.by] && (b.published || !from_outside);
    if (!is_there) fail("%s of program %u may not be there yet", name_of(address).c_str(), p.index);
    if (p.ended == p.threads.size()) fail("%s of program %u is signalled after that has ended", name_of(address).c_str(), p.index);
    return found->second;
}
inline void complete_if_done(Program& p, Mbarrier& b) {
    if (b.pending > 0 || b.bytes != 0) return;
    b.pending = b.arrivals;
    b.completed.join(b.arriving);
    b.completed.at[b.slot] = ++b.phases;
    changed(p);
}
void mbarrier_init(u32 address, u32 arrivals) {
    Program& p = *current->program;
    if (address % 8) fail("an mbarrier at %u, which is no multiple of 8", address);
    check_range(p, address, 8);
    if (p.bars.size() == MOST_BARRIERS) fail("more than %u mbarriers", MOST_BARRIERS);
    const u32 slot = MOST_WARPS + p.rank * MOST_BARRIERS + p.bars.size();
    Mbarrier& b = p.bars[address];
    b = Mbarrier();
    b.slot = slot, b.arrivals = b.pending = arrivals;
    b.by = current->warp->slot, b.time = clock_of(*current->warp).at[b.by];
}
void mbarriers_publish() {
    for (auto& [address, b] : current->program->bars) b.published = true;
}
void mbarrier_arrive(u32 address, int bytes) {
    preempt();
    Program& p = program_at(address);
    Mbarrier& b = bar_at(p, address % REMOTE, &p != current->program);
    if (b.pending == 0) fail("%s of program %u: more than the %u arrivals of a phase", name_of(address % REMOTE).c_str(), p.index, b.arrivals);
    release_to(b.arriving);
    b.bytes += bytes;
    b.pending--;
    complete_if_done(p, b);
    preempt();
}
void mbarrier_wait(u32 address, u32 parity) {
    preempt();
    Mbarrier& b = bar_at(*current->program, address, false);
    current->bar = address, current->parity = parity;
    if (b.phases % 2 == parity) wait_for(FOR_PHASE);
    acquire(b.completed);
}

}  // namespace hopper
