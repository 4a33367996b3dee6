//go:build bench

package bench

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/image/fetch"
)

const (
	pullRounds  = 3
	pullBytes   = 1 << 30 // default; COCOON_BENCH_PULL_BYTES overrides it
	pullGoal    = 1.1     // of the time of curl | sha256sum
	pullsBeside = 8
)

// pulls compares fetching over loopback, hashed on the way, with the equivalent shell command.
func pulls(t *testing.T, results *table) {
	for _, tool := range []string{"curl", "sha256sum"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%v: it is what pulls are compared with", err)
		}
	}
	size := int64(pullBytes)
	if v := os.Getenv("COCOON_BENCH_PULL_BYTES"); v != "" {
		size = must(strconv.ParseInt(v, 10, 64))(t)
	}
	dir := scratch(t)
	srv := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer srv.Close()
	whole, part := "whole.img", "part.img"
	randomFile(t, filepath.Join(dir, whole), size)
	randomFile(t, filepath.Join(dir, part), size/4)
	client := fetch.New(fetch.Options{})
	defer client.Close()
	sink := filepath.Join(dir, "sink")

	for _, m := range []struct {
		what   string
		file   string
		beside int
		ours   func(i int, url string) error
		theirs string // a shell command; $1 is the URL, $2 a file to write
	}{
		{
			"pull, hashed", whole, 1,
			func(_ int, url string) error { return pullTo(t, client, url, io.Discard) },
			`curl -s "$1" | sha256sum`,
		},
		{
			"pull, hashed, into a file", whole, 1,
			func(i int, url string) error { return pullInto(t, client, url, fmt.Sprint(sink, i)) },
			`curl -s "$1" | tee "$2" | sha256sum`,
		},
		{
			fmt.Sprintf("%d pulls at once, hashed", pullsBeside), part, pullsBeside,
			func(_ int, url string) error { return pullTo(t, client, url, io.Discard) },
			`curl -s "$1" | sha256sum`,
		},
	} {
		url := srv.URL + "/" + m.file
		var ours, theirs samples
		for range pullRounds {
			theirs = append(theirs, atOnce(t, m.beside, func(i int) error {
				out, err := exec.CommandContext(t.Context(), "sh", "-c", m.theirs, "sh", url, fmt.Sprint(sink, i)).CombinedOutput()
				if err != nil {
					return fmt.Errorf("%s: %w\n%s", m.theirs, err, out)
				}
				return nil
			}))
			ours = append(ours, atOnce(t, m.beside, func(i int) error { return m.ours(i, url) }))
		}
		bytes := must(os.Stat(filepath.Join(dir, m.file)))(t).Size()
		ratio := float64(ours.median()) / float64(theirs.median())
		results.add(row{
			what: fmt.Sprintf("%s: %d x %d MiB; A ours, B curl | sha256sum", m.what, m.beside, bytes>>20),
			a:    ms(ours.median()), b: ms(theirs.median()),
			figure: fmt.Sprintf("%.2f", ratio), goal: fmt.Sprintf("<= %.1f", pullGoal), n: pullRounds, missed: ratio > pullGoal,
		})
	}
}

func pullTo(t *testing.T, c *fetch.Client, url string, w io.Writer) error {
	b, err := c.Get(t.Context(), fetch.Request{URL: url})
	if err != nil {
		return err
	}
	defer b.Close()
	_, err = io.Copy(w, b)
	return err
}

func pullInto(t *testing.T, c *fetch.Client, url, path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return pullTo(t, c, url, f)
}

// atOnce runs do n times in parallel and returns how long they all took.
func atOnce(t *testing.T, n int, do func(i int) error) time.Duration {
	t.Helper()
	errs := make([]error, n)
	var all sync.WaitGroup
	start := time.Now()
	for i := range n {
		all.Go(func() { errs[i] = do(i) })
	}
	all.Wait()
	took := time.Since(start)
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	return took
}

// randomFile makes a file that compresses badly, as images do.
func randomFile(t *testing.T, path string, size int64) {
	t.Helper()
	f := must(os.Create(path))(t)
	defer f.Close()
	if _, err := io.CopyN(f, rand.NewChaCha8([32]byte{}), size); err != nil {
		t.Fatal(err)
	}
}
