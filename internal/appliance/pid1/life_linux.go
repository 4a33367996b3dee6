package pid1

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
)

// How long each part of the machine's life may take before the machine counts as hung.
const (
	prepareLimit = 15 * time.Minute // the steps before the children, a check of the file system among them
	firstBeat    = 5 * time.Minute  // from the start of the daemon until it says that it is alive
	silence      = 90 * time.Second // between two such messages
	endLimit     = 2 * time.Minute  // the end of all processes
	feedEvery    = 5 * time.Second

	daemonGrace = 90 * time.Second // at the end of the machine; the daemon stops the workloads then
	childGrace  = 20 * time.Second // of the others

	beatInterval = 60 * time.Second // that the daemon is told; it speaks twice in it
	notifySocket = "/run/cocoon-alive"
)

// life is what process 1 knows of the life of the machine: of itself while it prepares or ends it, and of the daemon meanwhile. The daemon says that it is alive
// as it says so to systemd.
type life struct {
	mu    sync.Mutex
	since time.Time
	limit time.Duration // after since, until the first message
	beat  time.Time     // of the last message; zero: there was none in this part
}

// begin begins another part of the machine's life.
func (l *life) begin(limit time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since, l.limit, l.beat = time.Now(), limit, time.Time{}
}

// tell notes a message of the daemon.
func (l *life) tell() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.beat = time.Now()
}

func (l *life) alive() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.beat.IsZero() {
		return time.Since(l.since) < l.limit
	}
	return time.Since(l.beat) < silence
}

// listen notes the messages of the daemon at a socket that only root can use. It returns when it fails.
func (l *life) listen(path string) error {
	_ = os.Remove(path)
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("listen to the daemon: %w", err)
	}
	defer c.Close()
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	b := make([]byte, 4096)
	for {
		n, err := c.Read(b)
		if err != nil {
			return fmt.Errorf("listen to the daemon: %w", err)
		}
		for line := range bytes.Lines(b[:n]) {
			if string(bytes.TrimSpace(line)) == "WATCHDOG=1" {
				l.tell()
			}
		}
	}
}

// speaks is the environment of a child that says that it is alive.
func speaks() []string {
	return []string{"NOTIFY_SOCKET=" + notifySocket, "WATCHDOG_USEC=" + strconv.FormatInt(beatInterval.Microseconds(), 10)}
}

// keeper feeds the watchdogs while the machine lives. What hangs while the system is on trial ends the trial: the watchdogs are not fed, and reset the machine. Of a
// system that is good only the daemon is killed, and starts again, because workloads live on without it; the watchdogs are for process 1 and the kernel then.
type keeper struct {
	life    *life
	dogs    interface{ feed() error }
	trial   func() bool
	kill    func()
	restart func() // restarts the machine if there is no watchdog
	log     *slog.Logger

	hung bool
}

// look does so once.
func (k *keeper) look() {
	if k.life.alive() {
		k.hung = false
		k.feed()
		return
	}
	if !k.trial() {
		k.log.Error("the daemon does not say that it is alive: killing it")
		k.kill()
		k.life.begin(firstBeat)
		k.feed()
		return
	}
	if k.hung {
		return
	}
	k.hung = true
	k.log.Error("the system on trial hangs: the watchdog is not fed any more, and restarts the machine", "in", watchdogTimeout)
	k.restart()
}

func (k *keeper) feed() {
	if err := k.dogs.feed(); err != nil {
		k.log.Warn("failed", "op", "feed the watchdog", "err", err)
	}
}

// keep feeds the watchdogs until the machine ends.
func (m *machine) keep(orders chan<- os.Signal) {
	k := keeper{life: &m.life, dogs: &m.dogs, trial: m.onTrial, kill: m.children.killWatched, log: m.log}
	k.restart = func() {
		if m.dogs.count() == 0 {
			orders <- syscall.SIGTERM
		}
	}
	tick := time.NewTicker(feedEvery)
	defer tick.Stop()
	for {
		k.look()
		<-tick.C
	}
}

// onTrial reports whether the system is on trial. The command line says so until the next start, also after a confirmation.
func (m *machine) onTrial() bool {
	if !m.boot.Trial {
		return false
	}
	s, err := bootctl.New(BootEnvironment, m.boot).Read()
	return err != nil || s.Good != m.boot.Slot
}
