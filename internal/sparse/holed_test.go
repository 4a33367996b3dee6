package sparse_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/sparse"
)

func TestReadFile(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := make([]byte, 1<<20)
	for _, at := range []int{0, 300 << 10, 301 << 10, 700<<10 + 17} {
		copy(want[at:], "what somebody wrote")
	}
	if err := sparse.WriteAt(f, want, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(int64(len(want))); err != nil {
		t.Fatal(err)
	}
	r, err := sparse.ReadFile(f)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Errorf("it reads %d bytes, %v", len(got), err)
	}

	if r, err = sparse.ReadFile(f); err != nil {
		t.Fatal(err)
	}
	var got []byte
	buf := make([]byte, 1000)
	for {
		n, err := r.Skip()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, make([]byte, n)...)
		part, err := r.Read(buf)
		got = append(got, buf[:part]...)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(got, want) {
		t.Error("with skipped holes, it reads something else")
	}
}
