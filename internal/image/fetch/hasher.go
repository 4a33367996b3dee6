package fetch

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
)

const (
	hashBlock  = 256 << 10 // fits into a core's cache
	hashBlocks = 4         // maximum of waiting blocks
)

// hasher computes a SHA-256 in a second goroutine. On a second core, the digest costs a fetch no time. The zero value is
// ready to use. Short content is hashed by the caller itself.
type hasher struct {
	h    hash.Hash
	cur  []byte      // being filled
	work chan []byte // full blocks; nil until there is one
	free chan []byte
	done chan struct{}
}

func (h *hasher) write(p []byte) {
	for len(p) > 0 {
		if h.cur == nil {
			h.cur = h.block()
		}
		n := copy(h.cur[len(h.cur):cap(h.cur)], p)
		h.cur, p = h.cur[:len(h.cur)+n], p[n:]
		if len(h.cur) == cap(h.cur) {
			h.hand()
		}
	}
}

// block returns a free block.
func (h *hasher) block() []byte {
	if h.free == nil {
		h.free = make(chan []byte, hashBlocks)
		for range hashBlocks {
			h.free <- nil
		}
	}
	if b := <-h.free; b != nil {
		return b[:0]
	}
	return make([]byte, 0, hashBlock)
}

// hand passes the full block to the second goroutine, which the first call starts. sum and close end it.
func (h *hasher) hand() {
	if h.work == nil {
		h.h = sha256.New()
		h.work, h.done = make(chan []byte, hashBlocks), make(chan struct{})
		go func(work <-chan []byte, free chan<- []byte) {
			defer close(h.done)
			for b := range work {
				h.h.Write(b)
				free <- b
			}
		}(h.work, h.free)
	}
	h.work <- h.cur
	h.cur = nil
}

// sum finishes the hash and returns its hex digits.
func (h *hasher) sum() string {
	h.close()
	if h.h == nil {
		h.h = sha256.New()
	}
	h.h.Write(h.cur)
	h.cur = nil
	return hex.EncodeToString(h.h.Sum(nil))
}

// close waits for the second goroutine to end.
func (h *hasher) close() {
	if h.work != nil {
		close(h.work)
		<-h.done
		h.work = nil
	}
}
