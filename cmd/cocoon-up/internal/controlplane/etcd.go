package controlplane

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/config"
)

// etcdStartTimeout allows for reading a large log after a crash on a slow disk.
const etcdStartTimeout = time.Minute

// etcd is a single-member etcd that serves on a unix socket and binds no TCP
// port. Every write is synced to disk before it is acknowledged, unless the
// configuration says unsafe-no-fsync.
type etcd struct {
	*embed.Etcd
	level zap.AtomicLevel
}

// startEtcd returns once etcd accepts writes.
func startEtcd(ctx context.Context, c *config.Config) (*etcd, error) {
	// etcd warns about defaults when it starts and calls its own stop a
	// failure. Neither message helps the reader of the log.
	level := zap.NewAtomicLevelAt(zap.ErrorLevel)
	logger, err := newEtcdLogger(level)
	if err != nil {
		return nil, fmt.Errorf("etcd logger: %w", err)
	}
	conf, err := etcdConfig(c, logger)
	if err != nil {
		return nil, err
	}
	server, err := embed.StartEtcd(conf)
	if err != nil {
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	e := &etcd{server, level}
	select {
	case <-e.Server.ReadyNotify():
		level.SetLevel(zap.WarnLevel)
		return e, nil
	case err = <-e.Err():
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(etcdStartTimeout):
		err = errors.New("not ready in time")
	}
	e.Close()
	return nil, fmt.Errorf("start etcd: %w", err)
}

func etcdConfig(c *config.Config, logger *zap.Logger) (*embed.Config, error) {
	client := url.URL{Scheme: "unix", Path: c.EtcdSocket}
	// The peer address is only this member's name in the member list. Nothing
	// listens on it or connects to it while the cluster has one member.
	peer := url.URL{Scheme: "http", Host: "127.0.0.1:2380"}

	e := embed.NewConfig()
	fs := flag.NewFlagSet("etcd", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	e.AddFlags(fs)
	if err := fs.Parse(c.EtcdArgs()); err != nil {
		return nil, fmt.Errorf("etcd flags: %w", err)
	}
	e.Name = "cocoon-up"
	e.Dir = filepath.Join(c.DataDir, "etcd")
	e.ListenClientUrls = []url.URL{client}
	e.AdvertiseClientUrls = []url.URL{client}
	e.ListenPeerUrls = nil
	e.AdvertisePeerUrls = []url.URL{peer}
	e.InitialCluster = e.InitialClusterFromName(e.Name)
	e.EnableGRPCGateway = false
	e.ZapLoggerBuilder = embed.NewZapLoggerBuilder(logger)
	return e, nil
}

func newEtcdLogger(level zap.AtomicLevel) (*zap.Logger, error) {
	conf := zap.NewProductionConfig()
	conf.Level = level
	conf.OutputPaths = []string{"stderr"}
	conf.EncoderConfig.EncodeTime = zapcore.ISO8601TimeEncoder
	logger, err := conf.Build(zap.AddStacktrace(zap.FatalLevel))
	if err != nil {
		return nil, err
	}
	return logger.Named("etcd"), nil
}

// stop closes etcd and reports whether that finished in time. Data is safe
// either way. After a clean close, the next start reads less.
func (e *etcd) stop(within time.Duration) bool {
	e.level.SetLevel(zap.FatalLevel)
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.Close()
	}()
	select {
	case <-done:
		return true
	case <-time.After(within):
		return false
	}
}

// lockDir creates dir and locks it for this process. The kernel releases the
// lock when the process ends, for any reason.
func lockDir(dir string) (unlock func() error, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create data folder: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		err = fmt.Errorf("lock %s: %w", f.Name(), err)
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = fmt.Errorf("data folder %s is in use by another control plane: %w", dir, err)
		}
		return nil, errors.Join(err, f.Close())
	}
	return f.Close, nil
}
