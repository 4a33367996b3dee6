package vkcocoon

import (
	"context"
	"fmt"
	"os"

	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"cocoonstack.io/cocoon/internal/app/restconfig"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Rate limits for requests to the API server. With client-go's default (5 a second), status updates of pods would
// queue.
const (
	mainQPS, mainBurst   = 1000, 2000
	eventQPS, eventBurst = 200, 1000
)

type clients struct {
	rest   *rest.Config
	main   kubernetes.Interface
	events kubernetes.Interface
	custom dynamic.Interface // of custom resources
	json   *rest.Config      // for other clients of custom resources, which have no protobuf
}

// connect reads the credentials and makes the clients. It sends nothing yet.
func connect(cfg Config) (clients, error) {
	rc, err := restconfig.Load(cfg.Kubeconfig)
	if err != nil {
		return clients{}, err
	}
	rc.UserAgent = "vk-cocoon/" + cfg.Version
	plain := rest.CopyConfig(rc)
	plain.QPS, plain.Burst = mainQPS, mainBurst
	rc.ContentType = "application/vnd.kubernetes.protobuf"
	rc.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	paced := func(qps float32, burst int) *rest.Config {
		own := rest.CopyConfig(rc)
		own.QPS, own.Burst = qps, burst
		return own
	}
	c := clients{rest: rc, json: plain}
	if c.main, err = kubernetes.NewForConfig(paced(mainQPS, mainBurst)); err != nil {
		return c, errdefs.Invalidf("kubeconfig: %w", err)
	}
	if c.events, err = kubernetes.NewForConfig(paced(eventQPS, eventBurst)); err != nil {
		return c, errdefs.Invalidf("kubeconfig: %w", err)
	}
	if c.custom, err = dynamic.NewForConfig(paced(mainQPS, mainBurst)); err != nil {
		return c, errdefs.Invalidf("kubeconfig: %w", err)
	}
	return c, nil
}

// clientCA is the authority for client certificates of the kubelet API: a separate file, reloaded when it changes, or
// otherwise the authority of the API server in the kubeconfig, which in most clusters also signs client certificates.
// Nil: no client certificate is accepted. run watches the file.
func clientCA(cfg Config, rc *rest.Config) (ca dynamiccertificates.CAContentProvider, run func(context.Context) error, err error) {
	run = func(context.Context) error { return nil }
	if cfg.ClientCA != "" {
		file, err := dynamiccertificates.NewDynamicCAContentFromFile("client-ca", cfg.ClientCA)
		if err != nil {
			return nil, nil, errdefs.Preconditionf("client certificate authority (VK_CLIENT_CA): %w", err)
		}
		return file, func(ctx context.Context) error { file.Run(ctx, 1); return nil }, nil
	}
	pem := rc.CAData
	if len(pem) == 0 && rc.CAFile != "" {
		if pem, err = os.ReadFile(rc.CAFile); err != nil {
			return nil, nil, fmt.Errorf("read the certificate authority of the kubeconfig: %w", err)
		}
	}
	if len(pem) == 0 {
		return nil, run, nil
	}
	if ca, err = dynamiccertificates.NewStaticCAContent("client-ca", pem); err != nil {
		return nil, nil, errdefs.Preconditionf("certificate authority of the kubeconfig: %w", err)
	}
	return ca, run, nil
}
