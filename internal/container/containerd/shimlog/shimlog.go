// Package shimlog is the program that the shim of a container starts with it: it writes the log, and keeps how the container has ended.
//
// containerd forgets the exit code of a container that ends while containerd does not run, because at its start it removes shims without a
// process. So the program asks its shim itself, and writes the answer into a file, which outlives both daemons and the node. It decides
// nothing, and containers run without it.
package shimlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	task "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/ttrpc"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/container/logfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Command is the first argument of the program; the second is the folder of the container's files.
const Command = "container-log"

const (
	logName  = "log"
	exitName = "exit"
	last     = 2 * time.Second // for the file, when the log has ended
)

// Log is the folder of the log in the folder of a container's files.
func Log(dir string) string { return filepath.Join(dir, logName) }

// Exit is how a run of a container has ended.
type Exit struct {
	Code int       `json:"code"`
	At   time.Time `json:"at"`
}

// Serve is the whole work of the program. It returns when the container has ended and its log is whole.
func Serve(dir string) error {
	ctx, cancel := context.WithCancel(context.Background())
	var recorder sync.WaitGroup
	recorder.Go(func() { _ = record(ctx, dir) }) // without the file, who asks learns that nobody saw the end
	err := logfile.Serve(Log(dir))
	limit := time.AfterFunc(last, cancel)
	defer limit.Stop()
	defer cancel()
	if err != nil {
		return err // the shim does not start the container
	}
	recorder.Wait()
	return nil
}

// record waits for the end of the container at its shim, and writes the file.
func record(ctx context.Context, dir string) error {
	address, err := shim()
	if err != nil {
		return err
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", address)
	if err != nil {
		return fmt.Errorf("connect to the shim: %w", err)
	}
	client := ttrpc.NewClient(conn)
	defer client.Close()
	id, namespace := os.Getenv("CONTAINER_ID"), os.Getenv("CONTAINER_NAMESPACE")
	ctx = ttrpc.WithMetadata(ctx, ttrpc.MD{"containerd-namespace-ttrpc": {namespace}})
	// The shim knows the container only after it has started this program.
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = 20*time.Millisecond, time.Second
	end, err := backoff.Retry(ctx, func() (*task.WaitResponse, error) {
		end, err := task.NewTTRPCTaskClient(client).Wait(ctx, &task.WaitRequest{ID: id})
		if errors.Is(err, ttrpc.ErrClosed) {
			err = backoff.Permanent(err)
		}
		return end, err
	}, backoff.WithBackOff(b), backoff.WithMaxElapsedTime(0))
	if err != nil {
		return fmt.Errorf("wait for the end of container %s: %w", id, err)
	}
	text, err := json.Marshal(Exit{Code: int(end.GetExitStatus()), At: end.GetExitedAt().AsTime()})
	if err != nil {
		return err
	}
	return atomicfile.WriteFile(filepath.Join(dir, exitName), text, 0o600)
}

// shim returns the path of the socket of the shim, whose folder is ours, too.
func shim() (string, error) {
	text, err := os.ReadFile("bootstrap.json")
	if err != nil {
		return "", fmt.Errorf("find the shim: %w", err)
	}
	var at struct{ Address, Protocol string }
	if err := json.Unmarshal(text, &at); err != nil {
		return "", fmt.Errorf("find the shim: %w", err)
	}
	path, ok := strings.CutPrefix(at.Address, "unix://")
	if !ok || at.Protocol != "ttrpc" {
		return "", errdefs.Unsupportedf("find the shim: it speaks %q at %q, and not ttrpc at a unix socket", at.Protocol, at.Address)
	}
	return path, nil
}

// Read returns how the last run of a container has ended. False: it runs, or nobody was there.
func Read(dir string) (Exit, bool, error) {
	text, err := os.ReadFile(filepath.Join(dir, exitName))
	if errors.Is(err, os.ErrNotExist) {
		return Exit{}, false, nil
	}
	var e Exit
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	if err != nil {
		return Exit{}, false, errdefs.DataLossf("read the end of a container: %w", err)
	}
	return e, true, nil
}

// Begin forgets the last run, because a new one begins.
func Begin(dir string) error {
	if err := os.Remove(filepath.Join(dir, exitName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget the last run of a container: %w", err)
	}
	return nil
}
