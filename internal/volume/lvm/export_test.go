package lvm

import "context"

// Rest is what Run does with devices that have not been used for a while.
func (s *Store) Rest(ctx context.Context) { s.rest(ctx, 0) }

// Watch is what Run does when the pool has become fuller.
func (s *Store) Watch() { s.watch(calm) }

// Settle is what Run does again and again.
func (s *Store) Settle(ctx context.Context) error { return s.settle(ctx) }
