package config

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// socketNameMax is sizeof(sun_path) less the final zero byte.
const socketNameMax = 107

// processFlags belong to the whole process, not to one component: setting
// them for one would silently set them for all, or for none.
var processFlags = []string{"feature-gates", "leader-elect", "logging-format", "v"}

// EtcdFlags are the flags of etcd that a configuration may set. With unsafe-no-fsync,
// a power cut loses the cluster: it is for clusters of tests.
var EtcdFlags = []string{
	"backend-batch-interval", "backend-batch-limit", "election-timeout", "heartbeat-interval",
	"max-request-bytes", "quota-backend-bytes", "snapshot-count", "unsafe-no-fsync",
}

// validate reports all errors at once.
func (c *Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }

	for _, p := range c.paths() {
		if p.required && *p.path == "" {
			bad("%s is required", p.key)
		}
	}
	if len(c.PKI.ServiceAccount.PublicKeys) == 0 {
		bad("pki.serviceAccount.publicKeys is required")
	}
	if (c.PKI.Signing.Cert == "") != (c.PKI.Signing.Key == "") {
		bad("pki.signing needs both cert and key")
	}
	if n := len(c.EtcdSocket); n > socketNameMax {
		bad("etcdSocket %s has %d bytes, but the path of a unix socket may have at most %d; set a shorter path", c.EtcdSocket, n, socketNameMax)
	}
	if c.SecurePort < 1 || c.SecurePort > 65535 {
		bad("securePort %d is not between 1 and 65535", c.SecurePort)
	}
	if _, err := netip.ParseAddr(c.BindAddress); err != nil {
		bad("bindAddress: %w", err)
	}
	if c.AdvertiseAddress != "" && !isEndpoint(c.AdvertiseAddress) {
		bad("advertiseAddress %s cannot be the endpoint of a Service", c.AdvertiseAddress)
	}
	for cidr := range strings.SplitSeq(c.ServiceCIDR, ",") {
		if _, err := netip.ParsePrefix(cidr); err != nil {
			bad("serviceCIDR: %w", err)
		}
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		bad("logFormat %q must be one of: text, json", c.LogFormat)
	}
	if c.Verbosity < 0 {
		bad("verbosity %d must not be negative", c.Verbosity)
	}
	for name := range c.Etcd.ExtraArgs {
		if !slices.Contains(EtcdFlags, name) {
			bad("etcd.extraArgs: %q must be one of: %s", name, strings.Join(EtcdFlags, ", "))
		}
	}
	for key, args := range map[string]map[string]string{
		"apiServer":         c.APIServer.ExtraArgs,
		"controllerManager": c.ControllerManager.ExtraArgs,
		"scheduler":         c.Scheduler.ExtraArgs,
	} {
		for name := range args {
			if strings.HasPrefix(name, "-") || name == "" {
				bad("%s.extraArgs: %q: write the name of the flag without dashes", key, name)
			}
			if slices.Contains(processFlags, name) {
				bad("%s.extraArgs: %s applies to the whole process and cannot be set here; it has its own key or a fixed value", key, name)
			}
		}
	}
	return errors.Join(errs...)
}

// isEndpoint reports whether address may be the endpoint of a Service, by the
// API's rules.
func isEndpoint(address string) bool {
	a, err := netip.ParseAddr(address)
	return err == nil && !a.IsUnspecified() && !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsMulticast()
}
