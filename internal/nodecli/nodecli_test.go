package nodecli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// binary is a client of a shell script that stands in for cocoon.
func binary(t *testing.T, script string) *Client {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cocoon")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	c, err := New(path, "/the/socket")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestMissingBinary(t *testing.T) {
	if _, err := New("/does/not/exist", ""); !errdefs.IsFailedPrecondition(err) {
		t.Error(err)
	}
}

// Other versions of the binary print this text instead of an empty list.
func TestNoVMs(t *testing.T) {
	c := binary(t, "echo 'No VMs found.'\n")
	if all, err := c.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("%v, %v", all, err)
	}
	events := 0
	err := c.Watch(t.Context(), -1, func(vm.Event) error { events++; return nil })
	if !errdefs.IsUnavailable(err) || events != 0 {
		t.Errorf("%d events, %v", events, err)
	}
	c = binary(t, `echo 'No VMs found.'; echo '{"event":"ADDED","vm":{"id":"x","config":{"name":"one"},"revision":3}}'; exec sleep 60`)
	enough := errors.New("enough")
	err = c.Watch(t.Context(), -1, func(e vm.Event) error {
		if e.Type != vm.EventAdded || e.Record.Spec.Name != "one" || e.Revision != 3 {
			t.Errorf("%+v", e)
		}
		return enough
	})
	if !errors.Is(err, enough) {
		t.Error(err)
	}
}

// The class of a failure comes from its report, or otherwise from the exit code; text for people is not parsed.
func TestClasses(t *testing.T) {
	for code, want := range map[int]errdefs.Class{1: errdefs.Internal, 2: errdefs.InvalidArgument, 3: errdefs.NotFound, 6: errdefs.Unavailable, 9: errdefs.DataLoss, 77: errdefs.Internal} {
		_, err := binary(t, fmt.Sprintf("echo 'Error: not found' >&2; exit %d\n", code)).Inspect(t.Context(), "x")
		if errdefs.ClassOf(err) != want {
			t.Errorf("exit code %d: %v", code, err)
		}
	}
	_, err := binary(t, `echo '{"class":"conflict","message":"somebody was first"}' >&3; exit 1`).Inspect(t.Context(), "x")
	if !errdefs.Is(err, errdefs.Conflict) || err.Error() != "somebody was first" {
		t.Error(err)
	}
	for _, script := range []string{"echo no JSON", "echo '{' >&3; exit 1", "kill -KILL $$"} {
		if _, err := binary(t, script).Inspect(t.Context(), "x"); err == nil {
			t.Errorf("%s is no failure", script)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := binary(t, "exec sleep 60").Inspect(ctx, "x"); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// A command in a guest may end with any code and print anything: that is not a failure of the client.
func TestExec(t *testing.T) {
	c := binary(t, `
case "$*" in *--control-fd=4*--env=TOKEN*--interactive*--" one cmd -x"*) ;; *) exit 99;; esac
echo "$TOKEN $COCOON_SOCKET"; cat; echo no >&2
head -n 1 <&4
exit 3`)
	var out, said bytes.Buffer
	signals := make(chan int, 1)
	signals <- 15
	code, err := c.Exec(t.Context(), "one", guest.Exec{Command: []string{"cmd", "-x"}, Env: []vm.EnvVar{{Name: "TOKEN", Value: "s3cret"}}},
		guest.Streams{Stdin: strings.NewReader("in\n"), Stdout: &out, Stderr: &said, Signals: signals})
	if err != nil || code != 3 || out.String() != "s3cret /the/socket\nin\n{\"signal\":15}\n" || said.String() != "no\n" {
		t.Errorf("%d, %v, %q, %q", code, err, out.String(), said.String())
	}
}

func TestAttachAndForward(t *testing.T) {
	c := binary(t, `
case "$*" in
  *"vm attach --control-fd=4 --interactive --container=side -- one") head -n 1 <&4; cat; echo no >&2;;
  *"vm forward -- one 80") cat;;
  *"vm forward -- one 81") echo '{"class":"unavailable","message":"nobody listens"}' >&3; exit 6;;
  *) exit 2;;
esac`)
	var out, said bytes.Buffer
	err := c.Attach(t.Context(), "one", guest.Attach{Container: "side", Rows: 3, Cols: 4}, guest.Streams{Stdin: strings.NewReader("in\n"), Stdout: &out, Stderr: &said})
	if err != nil || out.String() != "{\"rows\":3,\"cols\":4}\nin\n" || said.String() != "no\n" {
		t.Errorf("%v, %q, %q", err, out.String(), said.String())
	}
	out.Reset()
	if err := c.Forward(t.Context(), "one", 80, guest.Streams{Stdin: strings.NewReader("in"), Stdout: &out}); err != nil || out.String() != "in" {
		t.Errorf("%v, %q", err, out.String())
	}
	if err := c.Forward(t.Context(), "one", 81, guest.Streams{}); !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
	if err := c.Attach(t.Context(), "two", guest.Attach{}, guest.Streams{}); !errdefs.IsInvalid(err) {
		t.Error(err)
	}
}

// Secrets are neither in arguments nor in the environment: they go through pipes.
func TestSecretsGoThroughPipes(t *testing.T) {
	t.Setenv("EPOCH_TOKEN", "of-the-node")
	c := binary(t, `
[ -z "$EPOCH_TOKEN" ] || exit 98
for a; do case "$a" in
  *s3cret*) exit 99;;
  --token-file=*|--ca-cert=*|--auth-file=*) said="$said$(cat "${a#*=}")";;
esac; done
printf '{"id":"x","name":"%s","digest":"sha256:1"}' "$(printf %s "$said" | tr -d '"')"`)
	s, err := c.PushSnapshot(t.Context(), "warm", "http://epoch/warm:v1", snapshot.Auth{Token: "s3cret", CA: []byte("pem-")}, nil)
	if err != nil || s.Name != "pem-s3cret" {
		t.Errorf("%+v, %v", s, err)
	}
	img, err := c.Pull(t.Context(), image.PullRequest{Name: "r/x", Auth: []image.RegistryAuth{{Registry: "r", Username: "me", Password: "s3cret"}}}, nil)
	if err != nil || !strings.Contains(img.Name, "s3cret") {
		t.Errorf("%+v, %v", img, err)
	}
	if d, err := c.TagDigest(t.Context(), "http://epoch/warm:v1", snapshot.Auth{Username: "me", Password: "s3cret"}); err != nil || d != "sha256:1" {
		t.Errorf("%s, %v", d, err)
	}
}
