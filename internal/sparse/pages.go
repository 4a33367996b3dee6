package sparse

import "math/bits"

// Pages is a set of blocks of a file, with one bit per block.
type Pages []uint64

// NewPages returns an empty set for a file of size bytes, a multiple of Block.
func NewPages(size int64) Pages { return make(Pages, (size/Block+63)/64) }

// Set adds block n.
func (p Pages) Set(n int64) { p[n/64] |= 1 << (n % 64) }

// Clear removes block n.
func (p Pages) Clear(n int64) { p[n/64] &^= 1 << (n % 64) }

// Has reports whether block n is in the set.
func (p Pages) Has(n int64) bool { return p[n/64]&(1<<(n%64)) != 0 }

// Count returns how many blocks are in the set.
func (p Pages) Count() (n int64) {
	for _, w := range p {
		n += int64(bits.OnesCount64(w))
	}
	return n
}

// Add adds every block that overlaps an extent of m.
func (p Pages) Add(m []Extent) {
	for _, e := range m {
		for n := e.Offset / Block; n*Block < e.End(); n++ {
			if n%64 == 0 && (n+64)*Block <= e.End() {
				p[n/64] = ^uint64(0)
				n += 63
				continue
			}
			p.Set(n)
		}
	}
}

// Extents returns the set as the map of a file of size bytes.
func (p Pages) Extents(size int64) []Extent {
	var m []Extent
	for n := int64(0); n*Block < size; {
		length := p.run(n, size/Block)
		if p.Has(n) {
			m = append(m, Extent{n * Block, length * Block})
		}
		n += length
	}
	return m
}

// run returns the number of blocks from n on, up to end, that are all in the set or all outside it.
func (p Pages) run(n, end int64) int64 {
	want, same := p.Has(n), uint64(0)
	if want {
		same = ^uint64(0)
	}
	at := n + 1
	for at < end {
		if at%64 == 0 && p[at/64] == same {
			at += 64
			continue
		}
		if p.Has(at) != want {
			break
		}
		at++
	}
	return min(at, end) - n
}
